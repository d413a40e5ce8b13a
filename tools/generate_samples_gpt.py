#!/usr/bin/env python
"""Generates text from a checkpoint of any layout, on one process or, under torchrun, on several."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron.config.errors import UserError
from megatron.config.option import derived, option
from megatron.data.atomic import atomic_write
from megatron.inference.flags import ModelFlags, SamplingFlags, check_layout, open_model, parse_flags
from megatron.inference.generate import Generated, Token, generate
from megatron.inference.model import LoadedModel
from megatron.inference.text import TextStream, continuation
from megatron.training.program import Ranks, run_program

DESCRIPTION = """Generates text from a checkpoint of any layout, on one process or, under torchrun, on several.

    python tools/generate_samples_gpt.py --load DIR --prompt "def main("        one continuation, printed as it comes
    python tools/generate_samples_gpt.py --load DIR --num-samples 8 --genfile samples.jsonl
    python tools/generate_samples_gpt.py --load DIR --sample-input-file prompts.txt
    python tools/generate_samples_gpt.py --load DIR                             asks for prompts
    torchrun --nproc-per-node 4 tools/generate_samples_gpt.py --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 2 --load DIR ...                         a model split over four processes

The model's shape and the tokenizer come from the checkpoint; tokenizer flags replace the latter, for files that have
moved. The same seed gives the same texts at any batch size and on any layout, to rounding."""


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """What is generated; without any of these, prompts are asked for."""

    prompt: str | None = derived("none", "Continue this text and print the result.", metavar="TEXT")
    sample_input_file: str | None = derived("none", "Continue each line of this file.", metavar="FILE")
    sample_output_file: str | None = derived("the input file's name with .out", "Where those go.", metavar="FILE")
    num_samples: int = option(0, "Write this many texts without a prompt to --genfile.", unit="texts", minimum=0)
    genfile: str | None = derived("none", "JSON lines with text, length and finished.", metavar="FILE")
    micro_batch_size: int = option(8, "Texts generated at once.", unit="texts", minimum=1)


class Session:
    """A loaded model with the flags' way of choosing tokens.

    Args:
        model: on every rank.
        choice: how tokens are chosen.
        batch: texts generated at once.
    """

    def __init__(self, model: LoadedModel, choice: SamplingFlags, batch: int) -> None:
        self.model = model
        self.choice = choice
        self.batch = batch
        self.begun = 0

    def continue_all(self, texts: Sequence[str], live: bool = False) -> list[Generated]:
        """Continuations of a batch of texts; ``live`` prints the first as it comes."""
        prompts = [self.model.tokenizer.tokenize(text) if text else [] for text in texts]
        seeds = [self.choice.seed + self.begun + i for i in range(len(texts))]
        self.begun += len(texts)
        stream = TextStream(self.model.tokenizer, context=prompts[0])

        def show(row: int, token: Token) -> bool:
            print(stream.add(token.id), end="", flush=True)
            return False

        results = generate(
            self.model,
            prompts,
            self.choice.out_seq_length,
            self.choice.sampling(),
            seeds,
            cached=not self.choice.recompute,
            on_token=show if live else None,
        )
        if live and self.model.speaks:
            print(stream.finish(), flush=True)
        return results

    def in_batches(self, texts: Sequence[str]) -> list[Generated]:
        """Continuations of many texts, with a progress bar."""
        samples: list[Generated] = []
        with tqdm(total=len(texts), unit="text", disable=not self.model.speaks) as bar:
            for first in range(0, len(texts), self.batch):
                samples += self.continue_all(texts[first : first + self.batch])
                bar.update(len(samples) - first)
        return samples

    def text(self, sample: Generated) -> str:
        return self.model.tokenizer.detokenize(sample.tokens)

    def continuation(self, sample: Generated) -> str:
        return continuation(self.model.tokenizer, sample.tokens, sample.prompt_length)

    def write(self, path: str, parts: Sequence[str]) -> None:
        """Writes a file, on one rank."""
        if self.model.speaks:
            with atomic_write(Path(path)) as stream:
                stream.write("".join(parts).encode())

    def unconditional(self, task: TaskFlags) -> None:
        assert task.genfile is not None
        samples = self.in_batches([""] * task.num_samples)
        rows = [
            {"text": self.text(sample), "length": len(sample.tokens), "finished": sample.finished} for sample in samples
        ]
        self.write(task.genfile, [f"{json.dumps(row)}\n" for row in rows])

    def from_file(self, task: TaskFlags, texts: Sequence[str]) -> None:
        parts = [
            f"\nContext:{text}\n\nMegatron-LM:{self.continuation(sample)}\n"
            for text, sample in zip(texts, self.in_batches(texts), strict=True)
        ]
        self.write(task.sample_output_file or f"{task.sample_input_file}.out", parts)

    def _asked(self, patience_s: float) -> str:
        """A line that rank 0 reads; the others hear now and then that it still waits."""
        if self.model.topology.rank == 0:
            print("\nContext prompt (an empty line ends): ", end="", flush=True)
        text: str | None = None
        while text is None:
            if self.model.topology.rank == 0:
                alone = self.model.topology.layout.world_size == 1
                there = alone or select.select([sys.stdin], [], [], min(20.0, patience_s / 3))[0]
                text = sys.stdin.readline().rstrip("\n") if there else None
            text = self.model.tell_all_json(text, src=0)
        return text

    def interactive(self, patience_s: float) -> None:
        while True:
            text = self._asked(patience_s)
            if not text:
                return
            if self.model.speaks:
                print("\nMegatron-LM:", end="")
            self.continue_all([text], live=True)


def check(task: TaskFlags, choice: SamplingFlags) -> list[str]:
    """Checks the flags as a whole; the lines of the input file.

    Raises:
        UserError: when they make no sense, or the file cannot be read.
    """
    choice.sampling()
    if task.num_samples and not task.genfile:
        raise UserError("--num-samples needs --genfile FILE to write to")
    if task.genfile and not task.num_samples:
        raise UserError("--genfile needs --num-samples N, how many texts to write")
    asked = [name for name in ("prompt", "sample_input_file", "num_samples") if getattr(task, name)]
    if len(asked) > 1:
        raise UserError(f"{' and '.join('--' + name.replace('_', '-') for name in asked)} exclude each other")
    for name in ("genfile", "sample_output_file"):
        given = getattr(task, name)
        if given and not Path(given).parent.is_dir():
            raise UserError(f"--{name.replace('_', '-')} {given}: there is no such folder; make it first")
    if task.sample_input_file is None:
        if task.sample_output_file is not None:
            raise UserError("--sample-output-file needs --sample-input-file, what to continue")
        return []
    try:
        lines = Path(task.sample_input_file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
        raise UserError(f"--sample-input-file {task.sample_input_file}: {reason}") from error
    texts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not texts:
        raise UserError(f"--sample-input-file {task.sample_input_file}: has no line with a prompt")
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when it is done, 2 with a one-line reason when not."""

    def body(ranks: Ranks) -> None:
        sections = {"task": TaskFlags, "sampling": SamplingFlags}
        parsed = parse_flags(sys.argv[1:] if argv is None else argv, sections, "generate_samples_gpt.py", DESCRIPTION)
        model: ModelFlags = parsed.sections["model"]
        task: TaskFlags = parsed.sections["task"]
        choice: SamplingFlags = parsed.sections["sampling"]
        texts = check(task, choice)
        layout = check_layout(model, ranks.env, replicas=False)
        ranks.join(model.backend, model.distributed_timeout_minutes)
        if ranks.env.rank == 0:
            for note in parsed.notes:
                print(f"note: {note}", file=sys.stderr)
        session = Session(
            open_model(model, parsed.sections["tokenizer"], layout, ranks.env), choice, task.micro_batch_size
        )
        if task.num_samples:
            session.unconditional(task)
        elif texts:
            session.from_file(task, texts)
        elif task.prompt is not None:
            if session.model.speaks:
                print(task.prompt, end="", flush=True)
            session.continue_all([task.prompt], live=True)
        else:
            session.interactive(60 * model.distributed_timeout_minutes)

    return run_program(body)


if __name__ == "__main__":
    raise SystemExit(main())
