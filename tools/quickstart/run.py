"""Train a GPT on text found on this machine, in four processes, within minutes.

    make quickstart                             or, in an environment: python -m tools.quickstart.run
    make quickstart ARGS="--train-iters 1000"   train on

Completed steps are skipped, and training resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER
from tools.quickstart.process import CommandFailed, run_logged
from tools.quickstart.stages import QuickstartStage, digest
from tools.quickstart.summary import format_summary, summarize
from tools.quickstart.unigram import unigram

REPO = Path(__file__).resolve().parents[2]

VOCAB_SIZE = 4096
PROCESSES = 4
TRAIN_ITERS = 500

MODEL: dict[str, Any] = {
    "tensor-model-parallel-size": 2,
    "pipeline-model-parallel-size": 2,
    "num-layers": 4,
    "hidden-size": 256,
    "num-attention-heads": 4,
    "seq-length": 256,
    "max-position-embeddings": 256,
    "position-embedding-type": "rope",
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
}

TRAINING: dict[str, Any] = {
    "micro-batch-size": 4,
    "global-batch-size": 8,
    "lr": 2e-3,
    "min-lr": 2e-4,
    "lr-decay-style": "cosine",
    "lr-warmup-iters": 40,
    "weight-decay": 0.1,
    "adam-beta2": 0.95,
    "clip-grad": 1.0,
    "seed": 1234,
}

REPORTING: dict[str, Any] = {
    "log-interval": 20,
    "eval-interval": 100,
    "save-interval": 100,
}

PROMPT = 'def read_lines(path, encoding="utf-8"):'


def flags(values: dict[str, Any]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


class QuickstartPaths:
    """Paths below the output folder."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.corpus, self.vocabulary, self.run = out / "corpus", out / "vocabulary", out / "run"
        self.jsonl = self.run / "log.jsonl"
        self.checkpoints = self.run / "checkpoints"
        self.tracker = self.checkpoints / TRACKER

    def data(self, part: str) -> Path:
        """Return the prefix of the ``.bin/.idx`` pair of ``train`` or ``heldout``."""
        return self.out / "data" / f"{part}_text_document"


class Quickstart:
    """The steps of the quickstart.

    Args:
        out: output folder.
        train_iters: iterations of the whole run, including those of earlier calls; None: the default, or the
            iteration of the last checkpoint if that is more.
    """

    def __init__(self, out: Path, train_iters: int | None = None) -> None:
        self.paths = QuickstartPaths(out)
        saved = 0
        with suppress(OSError, ValueError):
            saved = int(self.paths.tracker.read_text())
        self.train_iters = train_iters or max(TRAIN_ITERS, saved)
        self.tokenizer_flags = [
            *("--tokenizer-type", "GPT2BPETokenizer"),
            *("--vocab-file", str(self.paths.vocabulary / "vocab.json")),
            *("--merge-file", str(self.paths.vocabulary / "merges.txt")),
        ]
        script = REPO / "tools" / "quickstart"
        self.corpus_key = digest(script / "make_corpus.py", sys.version, sysconfig.get_path("stdlib"))
        package = REPO / "megatron" / "data" / "preprocess"
        self.vocabulary_key = digest(self.corpus_key, package / "vocab_command.py", VOCAB_SIZE)
        self.data_key = digest(self.vocabulary_key, package / "command.py")
        self.run_key = digest(self.data_key, MODEL, TRAINING)

    def stages(self) -> list[QuickstartStage]:
        paths = self.paths
        parts = ("train", "heldout")
        trained_key = digest(self.run_key, self.train_iters)
        sample_key = digest(trained_key, REPO / "megatron" / "inference" / "generate_command.py", PROMPT)
        corpus = [paths.corpus / f"{part}.jsonl" for part in parts]
        vocabulary = [paths.vocabulary / name for name in ("vocab.json", "merges.txt")]
        data = [Path(f"{paths.data(part)}{end}") for part in parts for end in (".bin", ".idx")]
        return [
            QuickstartStage(title, paths.out / ".done" / f"{stamp}.json", key, outputs, action)
            for title, stamp, key, outputs, action in (
                ("corpus", "corpus", self.corpus_key, corpus, self.make_corpus),
                ("vocabulary", "vocabulary", self.vocabulary_key, vocabulary, self.train_vocabulary),
                ("preprocessing", "data", self.data_key, data, self.preprocess),
                ("training", "train", trained_key, [paths.tracker, paths.jsonl], self.train),
                ("sample", "sample", sample_key, [paths.out / "sample.txt"], self.generate),
            )
        ]

    def make_corpus(self) -> None:
        self._python("corpus", ["tools/quickstart/make_corpus.py", "--output-dir", str(self.paths.corpus)])

    def train_vocabulary(self) -> None:
        arguments = ["--input", str(self.paths.corpus / "train.jsonl"), "--vocab-size", str(VOCAB_SIZE)]
        arguments += ["--output-dir", str(self.paths.vocabulary)]
        self._python("vocabulary", ["tools/train_vocab.py", *arguments])

    def preprocess(self) -> None:
        self.paths.data("train").parent.mkdir(parents=True, exist_ok=True)
        for part in ("train", "heldout"):
            prefix = str(self.paths.data(part)).removesuffix("_text_document")
            arguments = ["--input", str(self.paths.corpus / f"{part}.jsonl"), "--output-prefix", prefix]
            arguments += [*self.tokenizer_flags, "--append-eod", "--workers", "2"]
            self._python(f"preprocess-{part}", ["tools/preprocess_data.py", *arguments])

    def train(self) -> None:
        self._start_over_when_changed()
        launcher = ["tools/launch.py", "--standalone", f"--nproc-per-node={PROCESSES}"]
        self._python("train", [*launcher, "pretrain_gpt.py", *self.train_flags()], show=True)

    def train_flags(self) -> list[str]:
        """Build the command line of ``pretrain_gpt.py``."""
        paths = self.paths
        warmup_iters = min(TRAINING["lr-warmup-iters"], self.train_iters - 1)  # less than a short run's whole length
        samples = (unigram(paths.data("heldout")).tokens - 1) // MODEL["seq-length"]
        return [
            *flags({**MODEL, **TRAINING, **REPORTING, "lr-warmup-iters": warmup_iters}),
            *flags({"train-iters": self.train_iters, "lr-decay-iters": self.train_iters}),
            # All whole batches of the held-out text: the loss is that of the text, not of a part.
            *flags({"eval-iters": max(1, samples // TRAINING["global-batch-size"])}),
            "--override-opt-param-scheduler",  # a longer run has another decay
            *self.tokenizer_flags,
            *flags({"train-data-path": paths.data("train"), "valid-data-path": paths.data("heldout")}),
            *flags({"data-cache-path": paths.out / "data" / "cache", "num-workers": 0}),
            *flags({"save": paths.checkpoints, "load": paths.checkpoints}),
            *flags({"tensorboard-dir": paths.run / "tensorboard", "log-json-file": paths.jsonl}),
            *flags({"distributed-backend": "gloo"}),
        ]

    def generate(self) -> None:
        prompts = self.paths.out / "prompt.txt"
        prompts.write_text(PROMPT + "\n")
        arguments = ["--load", str(self.paths.checkpoints), *self.tokenizer_flags]
        arguments += flags({"sample-input-file": prompts, "sample-output-file": self.paths.out / "sample.txt"})
        arguments += flags({"out-seq-length": 120, "temperature": 0.7, "top_p": 0.9, "seed": 1})
        self._python("sample", ["tools/generate_samples_gpt.py", *arguments])

    def finish(self) -> tuple[str, float]:
        """Draw the curve and write the summary; return its text, and how far the loss is below the unigram entropy."""
        from megatron.training.plots import plot_loss_curve

        paths = self.paths
        summary = summarize(paths.jsonl, unigram(paths.data("heldout")))
        summary.write(paths.out / "summary.json")
        reference = {"unigram entropy of the held-out text": summary.unigram_entropy}
        plot_loss_curve([paths.jsonl], paths.out / "loss.png", reference_lines=reference, title="Quickstart")
        results = {
            "loss curve": paths.out / "loss.png",
            "TensorBoard": paths.run / "tensorboard",
            "checkpoints": paths.checkpoints,
            "log": paths.jsonl,
            "summary": paths.out / "summary.json",
            "everything": paths.out,
        }
        sample = (paths.out / "sample.txt").read_text(errors="replace")
        return format_summary(summary, results, sample), summary.gain

    def _start_over_when_changed(self) -> None:
        """Move a run of another model or other data aside: its checkpoints do not fit."""
        mark = self.paths.run / "made_from"
        if self.paths.run.exists() and (not mark.exists() or mark.read_text() != self.run_key):
            aside = self.paths.out / f"run.{time.strftime('%Y%m%d-%H%M%S')}"
            self.paths.run.rename(aside)
            print(f"      data or settings changed: starting over; the earlier run is in {aside}", flush=True)
        self.paths.run.mkdir(parents=True, exist_ok=True)
        mark.write_text(self.run_key)

    def _python(self, step: str, arguments: list[str], show: bool = False) -> None:
        path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, *arguments]
        log = self.paths.out / "logs" / f"{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.with_suffix(".command").write_text(shlex.join(command) + "\n")
        run_logged(command, log, cwd=REPO, env=env, show=show)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "quickstart_out", help="folder to write to")
    parser.add_argument("--train-iters", type=int, help=f"iterations, including earlier calls' ({TRAIN_ITERS})")
    parser.add_argument(
        "--require-gain", type=float, metavar="NATS", help="fail unless the loss is so far below the unigram entropy"
    )
    args = parser.parse_args()
    start = time.monotonic()
    title = "start"
    try:
        quickstart = Quickstart(args.out.resolve(), args.train_iters)
        stages = quickstart.stages()
        for number, stage in enumerate(stages, 1):
            title = stage.title
            print(f"[{number}/{len(stages)}] {title} ...", flush=True)
            seconds = stage.run()
            print("      already done" if seconds is None else f"      done in {seconds:.1f} s", flush=True)
        title = "summary"
        text, gain = quickstart.finish()
    except KeyboardInterrupt:
        print("\ninterrupted: `make quickstart` resumes from the last checkpoint", file=sys.stderr)
        return 130
    except (CommandFailed, UserError, OSError) as error:
        print(f"error: {title} failed: {error}", file=sys.stderr)
        return 1
    print(f"\n{text}\n\n  {time.monotonic() - start:.0f} s in total")
    if args.require_gain is not None and gain < args.require_gain:
        print(f"error: {gain:.4f} nats below the unigram entropy, {args.require_gain} required", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
