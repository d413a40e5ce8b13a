"""Runs of a card: whole trainings, kept with their settings, so that an interrupted card can be continued."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.safety.canaries import heldout_canaries, training_documents, write_documents
from benchmarks.safety.settings import (
    CANARY_MODEL,
    TEXT_MODEL,
    Form,
    RankLayout,
    Size,
    heads_of,
    micro_batch_of,
)
from megatron.base.atomic import atomic_write
from megatron.base.code_digest import code_digest
from megatron.checkpoint.certificate import TrafficSpan, read_certificate
from megatron.training.records import Record, read_records

_DENSE = "dense"


@dataclass(frozen=True)
class CardRun:
    """A run of a card.

    Args:
        text: its specs, separated by spaces; empty for a dense run.
        layout: the layout.
        seed: seed of weights and of the order of samples.
        values: values of the other flags.
        data: folder of its text.
        title: description of the training, for lines of progress.
    """

    text: str
    layout: RankLayout
    seed: int
    values: dict[str, Any]
    data: Path
    title: str

    @cached_property
    def name(self) -> str:
        """Name of its files, with a digest of the settings and the package's code, so that other runs do not count."""
        settings = json.dumps([self.text, asdict(self.layout), self.seed, self.values, self.data.name, code_digest()])
        return f"{runs.slug(self.text or _DENSE)[:60]}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"

    def file(self, ending: str) -> Path:
        """Return a file of the run."""
        return self.data.parent / "runs" / f"{self.name}{ending}"

    @property
    def log(self) -> Path:
        return self.file(".jsonl")

    @property
    def checkpoint(self) -> Path:
        return self.file("")

    @property
    def cost_file(self) -> Path:
        """The file of its cost, which is written last."""
        return self.file(".cost")

    @property
    def is_finished(self) -> bool:
        return self.cost_file.exists()

    @property
    def dense(self) -> CardRun:
        """The run with the same settings and without compressors."""
        return replace(self, text="")

    @cached_property
    def flags(self) -> list[str]:
        """The command line of pretrain_gpt.py."""
        iterations = self.values["train-iters"]
        values = {**self.values, **self.layout.values, "seed": self.seed, "eval-interval": iterations}
        values["lr-warmup-iters"] = min(40, max(iterations // 4, 1))
        values |= {"save": self.checkpoint, "no-save-optim": True, "certificate": True}
        return runs.flags(values, self.text.split(), self.data, self.log)

    def train(self) -> None:
        """Train the run unless it is finished; an interrupted run starts over."""
        if self.is_finished:
            return
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        with record_cost(self.cost_file):
            title = f"{self.text or _DENSE}: {self.title}, seed {self.seed}"
            runs.train(self.flags, title, self.log, self.file(".log"), self.layout.ranks, self.layout.nodes)

    @property
    def records(self) -> list[Record]:
        return read_records(self.log)

    @property
    def loss(self) -> float:
        """Validation loss at the end."""
        return runs.final_loss(self.records)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return int(next(r["size"]["parameters"] for r in self.records if r.get("kind") == "config"))

    @property
    def tokens(self) -> int:
        """Number of tokens that it has read."""
        return int(next(r["consumed_tokens"] for r in reversed(self.records) if r.get("kind") == "train"))

    @property
    def traffic(self) -> TrafficSpan:
        """Bytes that it sent, by the ledger and by the kernel's counters."""
        (folder,) = self.checkpoint.glob("iter_*")
        return read_certificate(folder).statements.traffic[-1]

    @property
    def cost(self) -> RunCost:
        """Cost of the run."""
        return RunCost(**json.loads(self.cost_file.read_text()))


@dataclass(frozen=True)
class RunCost:
    """Cost of programs.

    Args:
        wall_s: seconds.
        cpu_s: seconds of processors, over all processes.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def record_cost(path: Path) -> Iterator[None]:
    """Write the cost of the programs that the body runs to a file when the body has finished."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    with atomic_write(path) as stream:
        stream.write(json.dumps(asdict(RunCost(time.monotonic() - start, cpu_s))).encode())


@dataclass(frozen=True)
class Planner:
    """Planner of the runs of a card.

    Args:
        out: folder of all cards; runs without compressors are shared.
        text: words of the card's specs.
        layout: their layout.
        form: form of the card.
    """

    out: Path
    text: str
    layout: RankLayout
    form: Form

    @property
    def text_data(self) -> Path:
        """Folder of the text."""
        return self.out / f"text-{self.form.train_bytes}"

    @cached_property
    def canary_data(self) -> Path:
        """Folder of the canaries, with a digest of a sample, so that those of other versions do not count."""
        sample = "".join(training_documents(200, heldout_canaries(20)))
        digest = hashlib.sha256(sample.encode()).hexdigest()[:8]
        return self.out / f"canaries-{self.form.canary_documents}-{digest}"

    def text_run(self, size: Size, seed: int) -> CardRun:
        """Return a run on text, with the card's specs."""
        values = {
            **TEXT_MODEL,
            "num-layers": self.form.layers,
            "hidden-size": size.width,
            "num-attention-heads": heads_of(size.width),
            "micro-batch-size": micro_batch_of(self.layout, TEXT_MODEL["global-batch-size"]),
            "train-iters": size.iterations,
            "eval-iters": self.form.evaluations,
        }
        title = f"text, width {size.width}, {size.iterations} iterations"
        return CardRun(self.text, self.layout, seed, values, self.text_data, title)

    def canary_run(self, seed: int) -> CardRun:
        """Return a run on canaries, with the card's specs."""
        values = {
            **CANARY_MODEL,
            "micro-batch-size": micro_batch_of(self.layout, CANARY_MODEL["global-batch-size"]),
            "train-iters": self.form.canary_iterations,
            "eval-iters": 5,
        }
        title = f"canaries, {self.form.canary_iterations} iterations"
        return CardRun(self.text, self.layout, seed, values, self.canary_data, title)

    @property
    def main_runs(self) -> list[CardRun]:
        """Runs of the main size, a seed each."""
        return [self.text_run(self.form.main, seed) for seed in range(1, self.form.seeds + 1)]

    @property
    def law_runs(self) -> dict[Size, list[CardRun]]:
        """Runs of the law's sizes; the main size has all seeds."""
        return {size: self.main_runs if size == self.form.main else self._few_runs(size) for size in self.form.sizes}

    @property
    def heldout_runs(self) -> list[CardRun]:
        """Runs of the held-out size."""
        return self._few_runs(self.form.heldout)

    def _few_runs(self, size: Size) -> list[CardRun]:
        return [self.text_run(size, seed) for seed in range(1, self.form.law_seeds + 1)]

    @property
    def canary_runs(self) -> list[CardRun]:
        """Runs on canaries."""
        return [self.canary_run(seed) for seed in range(1, self.form.canary_seeds + 1)]

    @property
    def all_runs(self) -> list[CardRun]:
        """Every run, after its dense run."""
        compressed = [*self.main_runs, *(run for runs in self.law_runs.values() for run in runs)]
        compressed += [*self.heldout_runs, *self.canary_runs]
        return list({run.name: run for each in compressed for run in (each.dense, each)}.values())

    def prepare(self) -> None:
        """Write the text and the canaries with their vocabularies, and token files of both, unless they exist."""
        runs.prepare(self.text_data, self.form.train_bytes)
        prepare_canaries(self.canary_data, self.form.canary_documents)


def prepare_canaries(folder: Path, count: int) -> None:
    """Write canaries as text and as tokens, one per byte, unless they exist."""
    if (folder / "data" / "done").exists():
        return
    heldout = heldout_canaries(200)
    documents = {
        "train": training_documents(count, heldout),
        "heldout": [canary.document for canaries in heldout.values() for canary in canaries],
    }
    for split, texts in documents.items():
        write_documents(texts, folder / "corpus" / f"{split}.jsonl")
    vocabulary = ["--vocab-size", "257", "--output-dir", str(folder / "vocabulary")]  # bytes and the end of document
    source = ["--input", str(folder / "corpus" / "train.jsonl")]
    runs.run(["tools/train_vocab.py", *source, *vocabulary], folder / "logs" / "vocabulary.log")
    for split in documents:
        runs.tokenize(folder, folder / "corpus" / f"{split}.jsonl", split)
    (folder / "data" / "done").touch()


def train_all(card_runs: Sequence[CardRun], say: Callable[[str], None]) -> None:
    """Train what is missing, with a line of progress before each run.

    Raises:
        SystemExit: when a run fails.
    """
    missing = [run for run in card_runs if not run.is_finished]
    if len(missing) < len(card_runs):
        say(f"{len(card_runs) - len(missing)} of {len(card_runs)} runs are finished")
    start = time.monotonic()
    for number, run in enumerate(missing):
        elapsed = time.monotonic() - start
        remaining = f", about {elapsed / number * (len(missing) - number) / 60:.0f} min left" if number else ""
        say(f"run {number + 1} of {len(missing)}{remaining} (load {os.getloadavg()[0]:.1f})")
        run.train()
