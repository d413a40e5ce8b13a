#!/usr/bin/env python
"""Generates text from a checkpoint of any layout, in one process.

    python tools/generate_samples_gpt.py --load FOLDER --prompt "def main("       one continuation, printed
    python tools/generate_samples_gpt.py --load FOLDER --num-samples 8 --genfile samples.json
    python tools/generate_samples_gpt.py --load FOLDER --sample-input-file prompts.txt
    python tools/generate_samples_gpt.py --load FOLDER                            asks for prompts

The model's shape and the tokenizer come from the checkpoint; tokenizer flags replace the latter, for files that have
moved.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.atomic import atomic_write
from megatron.inference.generate import Generated, generate
from megatron.inference.model import LoadedModel, load_model
from megatron.inference.sampling import Sampling


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate_samples_gpt.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, **options: object) -> None:
        spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
        parser.add_argument(*sorted(spellings), **options)  # type: ignore[arg-type]

    add("load", required=True, metavar="FOLDER", help="folder that --save wrote to")
    add("prompt", metavar="TEXT", help="continue this text and print the result")
    add("sample-input-file", metavar="FILE", help="continue each line of this file")
    add("sample-output-file", metavar="FILE", help="where those go (default: the input file's name with .out)")
    add("num-samples", type=int, default=0, metavar="N", help="write this many samples without a prompt to --genfile")
    add("genfile", metavar="FILE", help="JSON lines with text, length and finished")
    add("out-seq-length", type=int, default=256, metavar="N", help="new tokens, at most (default: 256)")
    add("temperature", type=float, default=1.0, metavar="X", help="divides the logits (default: 1.0)")
    add("top-k", type=int, default=0, metavar="N", help="choose among the N likeliest tokens (default: 0, all)")
    add("top-p", type=float, default=0.0, metavar="X", help="choose among those of total probability X (default: all)")
    add("greedy", action="store_true", help="always take the likeliest token")
    add("seed", type=int, default=1234, metavar="N", help="of the random draw (default: 1234)")
    add("micro-batch-size", type=int, default=8, metavar="N", help="samples generated at once (default: 8)")
    for name in ("tokenizer-type", "vocab-file", "merge-file", "tokenizer-model"):
        add(name, metavar="TEXT" if name == "tokenizer-type" else "FILE", help="instead of the run's own")
    flags = parser.parse_args(argv)
    if flags.out_seq_length < 1 or flags.micro_batch_size < 1 or flags.num_samples < 0:
        raise UserError("--out-seq-length and --micro-batch-size must be at least 1, --num-samples at least 0")
    if flags.num_samples and not flags.genfile:
        raise UserError("--num-samples needs --genfile FILE to write to")
    return flags


class Session:
    """A loaded model with the flags' way of choosing tokens."""

    def __init__(self, flags: argparse.Namespace, model: LoadedModel, sampling: Sampling) -> None:
        self.flags = flags
        self.model = model
        self.sampling = sampling
        self.batches = 0

    def continue_all(self, texts: Sequence[str]) -> list[Generated]:
        """Continuations of a batch of texts; every batch draws other numbers."""
        self.batches += 1
        prompts = [self.model.tokenizer.tokenize(text) if text else [] for text in texts]
        seed = self.flags.seed + self.batches - 1
        return generate(self.model, prompts, self.flags.out_seq_length, self.sampling, seed)

    def text(self, sample: Generated) -> str:
        return self.model.tokenizer.detokenize(sample.tokens)

    def continuation(self, sample: Generated) -> str:
        return self.model.tokenizer.detokenize(sample.tokens[sample.prompt_length :])

    def in_batches(self, texts: Sequence[str]) -> list[Generated]:
        size = self.flags.micro_batch_size
        samples: list[Generated] = []
        for first in range(0, len(texts), size):
            samples += self.continue_all(texts[first : first + size])
            sys.stderr.write(f"{len(samples)} of {len(texts)} samples\n")
        return samples

    def unconditional(self) -> None:
        samples = self.in_batches([""] * self.flags.num_samples)
        lines = [
            json.dumps({"text": self.text(sample), "length": len(sample.tokens), "finished": sample.finished})
            for sample in samples
        ]
        with atomic_write(Path(self.flags.genfile)) as stream:
            stream.write("".join(f"{line}\n" for line in lines).encode())

    def from_file(self) -> None:
        source = Path(self.flags.sample_input_file)
        texts = [line.rstrip("\n") for line in source.read_text(encoding="utf-8").splitlines()]
        texts = [text for text in texts if text.strip()]
        target = Path(self.flags.sample_output_file or f"{source}.out")
        parts = [
            f"\nContext:{text}\n\nMegatron-LM:{self.continuation(sample)}\n"
            for text, sample in zip(texts, self.in_batches(texts), strict=True)
        ]
        with atomic_write(target) as stream:
            stream.write("".join(parts).encode())

    def interactive(self) -> None:
        while True:
            try:
                text = input("\nContext prompt (an empty line ends): ")
            except EOFError:
                return
            if not text:
                return
            print(f"\nMegatron-LM:{self.continuation(self.continue_all([text])[0])}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when it is done, 2 with a one-line reason when not."""
    try:
        flags = parse_flags(sys.argv[1:] if argv is None else argv)
        sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.greedy)
        given = TokenizerConfig(
            tokenizer_type=flags.tokenizer_type,
            vocab_file=flags.vocab_file,
            merge_file=flags.merge_file,
            tokenizer_model=flags.tokenizer_model,
        )
        session = Session(flags, load_model(flags.load, tokenizer=given), sampling)
        if flags.num_samples:
            session.unconditional()
        elif flags.sample_input_file:
            session.from_file()
        elif flags.prompt is not None:
            print(session.text(session.continue_all([flags.prompt])[0]))
        else:
            session.interactive()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: {getattr(error, 'filename', None) or flags.sample_input_file}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
