"""Speed of generation beside Hugging Face's ``generate`` on the same weights.

    make bench-generate                 GPT-2's smallest shape and a Llama of its size (about five minutes on two cores)
    make bench-generate ARGS="--quick"  a smoke run on tiny shapes

Both sides continue the same prompts greedily by the same number of tokens with keys and values cached, in one process,
taking turns; their tokens are compared. Rates are medians. The limit is that of one token a row: all weights must
come from memory once (at the rate of a copy measured here), or their products be computed (at the rate of a large
product), whichever takes longer.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.checkpoint.convert.command import convert, parse
from megatron.inference.generate import generate
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.planner.measure import rate_of


def gpt2(layers: int, hidden: int, heads: int, vocab: int) -> Any:
    """A random GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=1024, n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocab)
    return GPT2LMHeadModel(config).eval()


def models(quick: bool) -> dict[str, Any]:
    """Random models of transformers, by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, heads, vocab = (2, 64, 2, 512) if quick else (12, 768, 12, 50257)
    torch.manual_seed(1)
    plain = gpt2(layers, hidden, heads, vocab)
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads // 2, max_position_embeddings=1024, vocab_size=vocab,
        )
    )  # fmt: skip
    return {"GPT-2": plain, "Llama, 2 queries a group": llama.eval()}


def loaded(theirs: Any, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Our model with their weights."""
    from megatron.config.tokenizer import TokenizerConfig
    from megatron.inference.model import load_model

    with tempfile.TemporaryDirectory(prefix="bench-generate-") as name:
        folder = Path(name)
        theirs.save_pretrained(folder / "hf")
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        arguments = ["-i", str(folder / "hf"), "-o", str(folder / "ours"), "--to", "megatron-cc", "--dtype", kind]
        try:
            with redirect_stderr(io.StringIO()):
                convert(parse(arguments))
        except UserError as error:
            sys.exit(f"error: {error}")
        tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=theirs.config.vocab_size - 1)
        return load_model(folder / "ours", tokenizer=tokenizer, device=device)


def weights_of(model: LoadedModel) -> list[torch.Tensor]:
    """The weights that must be read for each token."""
    return [p for name, p in model.stage.named_parameters() if p.dim() > 1 and "position" not in name]


def synchronizer(device: str) -> Callable[[], None]:
    """A function that waits for a device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def limit(model: LoadedModel, rows: int, synchronize: Callable[[], None]) -> float:
    """Tokens per second at the limits of memory and products."""
    weights = weights_of(model)
    elements, size = sum(p.numel() for p in weights), weights[0].element_size()
    source = torch.empty(max(1 << 26, elements // 4), dtype=weights[0].dtype, device=model.device).normal_()
    # A sum reads, as a product with few rows does; a copy would write as well.
    read = rate_of(lambda: torch.mv(source[: 1 << 26].view(1 << 13, -1), source[: 1 << 13]), synchronize)
    a = torch.randn((2048, 2048), dtype=weights[0].dtype, device=model.device)
    products = rate_of(lambda: a @ a, synchronize) * 2 * 2048**3
    return rows / max(elements * size / (read * (1 << 26) * size), 2.0 * elements * rows / products)


def measure(
    ours: LoadedModel, theirs: Any, prompts: Sequence[Sequence[int]], new: int, turns: int, sync: Callable[[], None]
) -> tuple[float, float, float, float]:
    """Measures tokens per second of ours and theirs, the ratio of pairs, and the share of equal tokens."""
    ids = torch.tensor(prompts, device=ours.device)
    found: tuple[list[list[int]], list[list[int]]] = ([], [])

    def run_ours() -> None:
        found[0][:] = [sample.tokens for sample in generate(ours, prompts, new, Sampling(greedy=True))]

    def run_theirs() -> None:
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                              do_sample=False, pad_token_id=0)  # fmt: skip
        found[1][:] = out.tolist()

    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for side, run in enumerate((run_ours, run_theirs)):
            sync()
            start = time.perf_counter()
            run()
            sync()
            if turn:
                rates[side].append(len(prompts) * new / (time.perf_counter() - start))
    ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
    # A row that ended early would not have been as much work.
    pairs = [(a, b) for x, y in zip(*found, strict=True) for a, b in zip_longest(x, y)]
    equal = sum(a == b for a, b in pairs) / len(pairs)
    return statistics.median(rates[0]), statistics.median(rates[1]), ratio, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--turns", type=int, default=5, help="measured runs of each side (5)")
    parser.add_argument("--threads", type=int, default=2, help="of each side, on a CPU (2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sync = synchronizer(device.type)
    new, lengths = (8, 8) if options.quick else (128, 64)
    print(f"{device.type}, {options.threads} threads, prompts of {lengths} tokens, {new} new tokens each\n")
    print("| model | type | prompts | ours tokens/s | theirs | ours / theirs | of the limit | equal tokens |")
    print("|---|---|---|---|---|---|---|---|")
    for name, theirs in models(options.quick).items():
        for dtype in (torch.float32, torch.bfloat16):
            theirs.to(dtype=dtype, device=device)
            ours = loaded(theirs, dtype, device)
            for count in (1, 8):
                generator = torch.Generator().manual_seed(count)
                prompts = torch.randint(0, theirs.config.vocab_size - 1, (count, lengths), generator=generator).tolist()
                mine, other, ratio, equal = measure(ours, theirs, prompts, new, options.turns, sync)
                share = mine / limit(ours, count, sync)
                kind = str(dtype).removeprefix("torch.")
                rates = f"{mine:.1f} | {other:.1f} | {ratio:.2f} | {share:.2f}"
                print(f"| {name} | {kind} | {count} | {rates} | {equal:.0%} |", flush=True)


if __name__ == "__main__":
    main()
