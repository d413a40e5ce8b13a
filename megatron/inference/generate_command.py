"""Generates text from a checkpoint of any layout, on one process or, under tools/launch.py, on several."""

from __future__ import annotations

import io
import json
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from megatron.base.atomic import atomic_write, check_writable
from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.base.text_file import read_lines
from megatron.base.user_text import flag_of
from megatron.distributed.agreement import run_together
from megatron.inference.flags import ModelFlags, SamplingFlags, check_layout, open_model, parse_flags
from megatron.inference.generate import Generated, Token, generate
from megatron.inference.model import LoadedModel
from megatron.inference.text import TextStream, continuation, is_text
from megatron.training.program import Ranks, run_program

DESCRIPTION = """Generates text from a checkpoint of any layout, on one process or, under tools/launch.py, on several.

    python tools/generate_samples_gpt.py --load DIR --prompt "def main("        prints a continuation token by token
    python tools/generate_samples_gpt.py --load DIR --num-samples 8 --genfile samples.jsonl
    python tools/generate_samples_gpt.py --load DIR --sample-input-file prompts.txt
    python tools/generate_samples_gpt.py --load DIR                             asks for prompts
    python tools/launch.py --nproc-per-node 4 tools/generate_samples_gpt.py --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 2 --load DIR ...                         a model split over four processes

The model's shape and the tokenizer come from the checkpoint; tokenizer flags override the latter, for example if its
files have moved. The same seed gives the same texts at any batch size and on any layout, up to rounding."""


@dataclass(frozen=True, kw_only=True)
class GenerationTaskFlags:
    """Texts to generate; without any of these flags, the program asks for prompts."""

    prompt: str | None = derived("none", "Continue this text, and print the result.", metavar="TEXT")
    sample_input_file: str | None = derived("none", "Continue each line of this file.", metavar="FILE")
    sample_output_file: str | None = derived(
        "the input file's name with .out", "File for these continuations.", metavar="FILE"
    )
    num_samples: int = option(0, "Write this many texts without a prompt to --genfile.", unit="texts", minimum=0)
    genfile: str | None = derived(
        "none", "File for these texts: JSON lines with text, length and finished.", metavar="FILE"
    )
    micro_batch_size: int = option(8, "Number of texts generated together.", unit="texts", minimum=1)

    @property
    def output(self) -> tuple[str, str] | None:
        """Flag and name of the output file; None if the output is printed."""
        if self.genfile is not None:
            return "--genfile", self.genfile
        if self.sample_output_file is not None:
            return "--sample-output-file", self.sample_output_file
        return ("--sample-output-file", f"{self.sample_input_file}.out") if self.sample_input_file else None


class Session:
    """A loaded model and the sampling options of the command line.

    Args:
        model: the model, on every rank.
        choice: sampling options.
        batch: number of texts generated together.
    """

    def __init__(self, model: LoadedModel, choice: SamplingFlags, batch: int) -> None:
        self.model = model
        self.choice = choice
        self.batch = batch
        self.started_samples = 0

    def continue_texts(self, texts: Sequence[str], live: bool = False) -> list[Generated]:
        """Continue a batch of texts; ``live`` prints the first text token by token."""
        prompts = [self.model.tokenizer.tokenize(text) if text else [] for text in texts]
        seeds = [self.choice.seed + self.started_samples + i for i in range(len(texts))]
        self.started_samples += len(texts)
        stream = TextStream(self.model.tokenizer, context=prompts[0])

        def show(row: int, token: Token) -> bool:
            print(stream.add_token(token.id), end="", flush=True)
            return False

        results = generate(
            self.model,
            prompts,
            self.choice.out_seq_length,
            self.choice.sampling(),
            seeds,
            stop_tokens=self.choice.stop_token_ids,
            cached=not self.choice.recompute,
            on_token=show if live else None,
        )
        if live and self.model.is_sampling_rank:
            print(stream.finish(), flush=True)
        return results

    def continue_in_batches(self, texts: Sequence[str]) -> list[Generated]:
        """Continue many texts in batches, with a progress bar."""
        samples: list[Generated] = []
        with tqdm(total=len(texts), unit="text", disable=not self.model.is_sampling_rank) as bar:
            for first in range(0, len(texts), self.batch):
                samples += self.continue_texts(texts[first : first + self.batch])
                bar.update(len(samples) - first)
        return samples

    def write(self, task: GenerationTaskFlags, texts: Sequence[str]) -> None:
        """Write the output file on the sampling rank; print its content if writing fails.

        Raises:
            UserError: on every rank, when writing fails.
        """
        assert task.output is not None
        flag, name = task.output

        def write_file() -> None:
            try:
                with atomic_write(Path(name)) as stream:
                    stream.write("".join(texts).encode())
            except OSError as error:
                print("".join(texts), end="", flush=True)
                raise UserError(f"{flag} {name}: {error.strerror}; the texts are printed instead") from error

        run_together(self.model.topology.control.pg, write_file if self.model.is_sampling_rank else lambda: None)

    def write_samples(self, task: GenerationTaskFlags) -> None:
        detokenize = self.model.tokenizer.detokenize
        rows = [
            {"text": detokenize(sample.tokens), "length": len(sample.tokens), "finished": sample.finished}
            for sample in self.continue_in_batches([""] * task.num_samples)
        ]
        self.write(task, [f"{json.dumps(row)}\n" for row in rows])

    def write_continuations(self, task: GenerationTaskFlags, texts: Sequence[str]) -> None:
        entries = []
        for text, sample in zip(texts, self.continue_in_batches(texts), strict=True):
            new_text = continuation(self.model.tokenizer, sample.tokens, sample.prompt_length)
            entries.append(f"\nContext:{text}\n\nMegatron-LM:{new_text}\n")
        self.write(task, entries)

    def continue_typed_prompts(self, patience_s: float) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # an invalid line must not end the session
        # With several ranks, the others must hear from this rank before their timeout, so it must not block. It then
        # reads without a buffer, since ``select`` does not see lines that are in a buffer already.
        reads, can_block = self.model.topology.rank == 0, self.model.topology.layout.world_size == 1
        unbuffered = io.FileIO(sys.stdin.fileno(), closefd=False) if reads and not can_block else None
        while True:
            request = "\nContext prompt (an empty line ends): "
            if reads:
                print(request, end="", flush=True)
            text: str | None = None
            while text is None:
                if reads:
                    if unbuffered is None:
                        text = sys.stdin.readline()
                    elif select.select([unbuffered], [], [], min(20.0, patience_s / 3))[0]:
                        text = unbuffered.readline().decode(sys.stdin.encoding, "surrogateescape")
                    if text is not None:
                        text = text.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff")
                    if text is not None and not is_text(text):
                        print(f"the line is not valid UTF-8{request}", end="", flush=True)
                        text = None
                text = self.model.broadcast_json(text, src=0)
            if not text:
                return
            if self.model.is_sampling_rank:
                print("\nMegatron-LM:", end="")
            self.continue_texts([text], live=True)


def check_flags(task: GenerationTaskFlags, choice: SamplingFlags) -> list[str]:
    """Validate the flags; return the non-empty lines of the input file.

    Raises:
        UserError: when the flags are inconsistent, or the file cannot be read.
    """
    choice.sampling()
    if task.num_samples and not task.genfile:
        raise UserError("--num-samples needs --genfile FILE to write to")
    if task.genfile and not task.num_samples:
        raise UserError("--genfile needs --num-samples N, the number of texts to write")
    input_flags = [name for name in ("prompt", "sample_input_file", "num_samples") if getattr(task, name)]
    if len(input_flags) > 1:
        raise UserError(f"{' and '.join(flag_of(name) for name in input_flags)} exclude each other")
    if task.prompt is not None and not is_text(task.prompt):
        raise UserError("--prompt: is not valid UTF-8; --sample-input-file reads prompts from a file")
    if task.sample_output_file is not None and task.sample_input_file is None:
        raise UserError("--sample-output-file needs --sample-input-file, the texts to continue")
    texts: list[str] = []
    if task.sample_input_file is not None:
        texts = [line for line in read_lines(task.sample_input_file, "--sample-input-file") if line.strip()]
        if not texts:
            raise UserError(f"--sample-input-file {task.sample_input_file}: has no line with a prompt")
    if task.output is not None:
        flag, name = task.output
        check_writable(name, flag)
        input_file = task.sample_input_file
        if input_file is not None and Path(name).exists() and Path(name).samefile(input_file):
            raise UserError(f"{flag} {name}: holds the prompts, which would be overwritten; name another file")
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, or 2 after printing a one-line error."""

    def body(ranks: Ranks) -> None:
        sections = {"task": GenerationTaskFlags, "sampling": SamplingFlags}
        parsed = parse_flags(sys.argv[1:] if argv is None else argv, sections, "generate_samples_gpt.py", DESCRIPTION)
        model: ModelFlags = parsed.sections["model"]
        task: GenerationTaskFlags = parsed.sections["task"]
        choice: SamplingFlags = parsed.sections["sampling"]
        texts = check_flags(task, choice)
        layout = check_layout(model, ranks.env, replicas=False)
        ranks.join(model.backend, model.distributed_timeout_minutes, parsed.sections, parsed.notes)
        session = Session(
            open_model(model, parsed.sections["tokenizer"], layout, ranks.env), choice, task.micro_batch_size
        )
        if task.num_samples:
            session.write_samples(task)
        elif texts:
            session.write_continuations(task, texts)
        elif task.prompt is not None:
            if session.model.is_sampling_rank:
                print(task.prompt, end="", flush=True)
            session.continue_texts([task.prompt], live=True)
        else:
            session.continue_typed_prompts(60 * model.distributed_timeout_minutes)

    return run_program(body)
