"""Speed of generation compared with Hugging Face's ``generate`` on the same weights.

    make bench-generate                 GPT-2's smallest shape and a Llama of its size (about five minutes on two cores)
    make bench-generate ARGS="--quick"  a smoke run on tiny shapes

Both sides continue the same prompts greedily by the same number of tokens with cached keys and values, in one process,
taking turns; their tokens are compared. Rates are medians. The limit of a step is the time to read all weights once at
the read rate measured here, or to compute their products at the rate of a large product, whichever is longer.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import Shape, hugging_face
from benchmarks.report import Column, Table
from benchmarks.turns import Step, in_turns, synchronize, timed
from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.convert.command import convert, parse
from megatron.inference.generate import generate
from megatron.inference.model import LoadedModel, load_model
from megatron.inference.sampling import Sampling
from megatron.planner.measure import measure_rate

MAX_LENGTH = 1024
TURNS = 5
TABLE = Table(
    Column("model", "model"),
    Column("type", "type"),
    Column("prompts", "prompts"),
    Column("ours tokens/s", "tokens_per_s", ".1f"),
    Column("theirs", "their_tokens_per_s", ".1f"),
    Column("ours / theirs", "ratio", ".2f"),
    Column("of the limit", "of_limit", ".2f"),
    Column("equal tokens", "equal", ".0%"),
)


def shapes(quick: bool) -> dict[str, Shape]:
    """Shapes of the models, by name."""
    layers, hidden, vocab = (2, 128, 512) if quick else (12, 768, 50257)
    gpt2 = Shape(layers, hidden, MAX_LENGTH, 1, vocab)
    llama = replace(gpt2, llama=True, ffn=hidden * 8 // 3, groups=hidden // 128)
    return {"GPT-2": gpt2, "Llama, 2 queries a group": llama}


def load_converted(theirs: Any, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Our model with the weights of a model of transformers."""
    with tempfile.TemporaryDirectory(prefix="bench-generate-") as name:
        folder = Path(name)
        theirs.save_pretrained(folder / "hf")
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        flags = ["-i", str(folder / "hf"), "-o", str(folder / "ours"), "--to", "megatron-cc", "--dtype", precision]
        try:
            with redirect_stderr(io.StringIO()):
                convert(parse(flags))
        except UserError as error:
            sys.exit(f"error: {error}")
        tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=theirs.config.vocab_size - 1)
        return load_model(folder / "ours", tokenizer=tokenizer, device=device)


def weights_of(model: LoadedModel) -> list[torch.Tensor]:
    """Return the weights that are read for each token."""
    return [p for name, p in model.stage.named_parameters() if p.dim() > 1 and "position" not in name]


def limit_rate(model: LoadedModel, rows: int) -> float:
    """Tokens per second at the limits of memory and products."""
    wait = partial(synchronize, model.device.type)
    weights = weights_of(model)
    elements = sum(p.numel() for p in weights)
    a, matrix = (torch.randn((n, n), dtype=weights[0].dtype, device=model.device) for n in (2048, 8192))
    # A product with a vector only reads, as products with few rows do; a copy would write as well.
    read_rate = measure_rate(lambda: torch.mv(matrix, matrix[0]), wait) * matrix.numel()
    product_rate = measure_rate(lambda: a @ a, wait) * 2 * 2048**3
    return rows / max(elements / read_rate, 2.0 * elements * rows / product_rate)


def measure(
    ours: LoadedModel,
    theirs: Any,
    prompts: Sequence[Sequence[int]],
    new: int,
    turns: int,
    after_turn: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Measure tokens per second of ours and theirs, their ratio over pairs, and the share of equal tokens.

    Continues the prompts of a batch by ``new`` tokens each, in ``turns`` turns of each side.
    """
    prompt_ids = torch.tensor(prompts, device=ours.device)
    outputs: tuple[list[list[int]], list[list[int]]] = ([], [])

    def run_ours() -> None:
        outputs[0][:] = [sample.tokens for sample in generate(ours, prompts, new, Sampling(greedy=True))]

    def run_theirs() -> None:
        out = theirs.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=new,
                              min_new_tokens=new, do_sample=False, pad_token_id=0)  # fmt: skip
        outputs[1][:] = out.tolist()

    def turn(run: Step) -> float:
        seconds = timed(run, ours.device.type)
        after_turn()
        return seconds

    turn_functions = (partial(turn, run) for run in (run_ours, run_theirs))
    measured, tokens = in_turns(*turn_functions, turns=turns, warm=1), len(prompts) * new
    # zip_longest: a row that ended early would not have been as much work.
    pairs = [(a, b) for our_row, their_row in zip(*outputs, strict=True) for a, b in zip_longest(our_row, their_row)]
    equal = sum(a == b for a, b in pairs) / len(pairs)
    rates = {"tokens_per_s": tokens / measured.median(), "their_tokens_per_s": tokens / measured.median(1)}
    return {**rates, "ratio": measured.ratio(), "equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side on a CPU (2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    new, length = (8, 8) if options.quick else (128, 64)
    print(f"{device.type}, {options.threads} threads, prompts of {length} tokens, {new} new tokens each\n")
    print(TABLE.head())
    for name, shape in shapes(options.quick).items():
        torch.manual_seed(1)
        theirs = hugging_face(shape, use_cache=True).eval()
        for dtype in (torch.float32, torch.bfloat16):
            theirs.to(dtype=dtype, device=device)
            ours = load_converted(theirs, dtype, device)
            for count in (1, 8):
                generator = torch.Generator().manual_seed(count)
                prompts = torch.randint(0, theirs.config.vocab_size - 1, (count, length), generator=generator).tolist()
                figures = measure(ours, theirs, prompts, new, TURNS)
                if not options.quick:  # measuring the limit takes minutes on a processor without bf16 instructions
                    figures["of_limit"] = figures["tokens_per_s"] / limit_rate(ours, count)
                names = {"model": name, "type": str(dtype).removeprefix("torch."), "prompts": count}
                print(TABLE.line({**names, **figures}), flush=True)


if __name__ == "__main__":
    main()
