"""Trains a small GPT with and without compression and compares validation losses and bytes.

    make bench-convergence                        all cases and seeds; finished ones are kept
    make bench-convergence ARGS="--cases 'dense; CB, LEP' --seeds 1 --table"

Every case trains on the same text, the quickstart's, for several epochs of the same samples, on 2 pipeline stages x 2
replicas. Afterwards each trained model goes on with held-out text (the task CONTINUATION): a loss may hide what
compression does to that. Prints a table (mean and spread over the seeds) and writes it with pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import REPO
from benchmarks.convergence_figures import Outcome, draw_curves, draw_outcomes
from megatron.training.plots import of_final_draw
from megatron.training.records import read_records

CB = "pp-backward=lowrank,rank=16"
MEAN = f"{CB},when=epilogue,error-feedback=lazy-mean"
RADIUS = "dp-grad=stable-topk,interval=5,flush=rotate,warmup=200"
SC = "dp-grad=powersgd,rank=16,stages=first:1,warmup=40"

CASES: dict[str, list[str]] = {
    "dense": [],
    "CB, LEP": [f"{CB},when=epilogue,error-feedback=lazy"],
    "CB, LEP of means": [MEAN],
    "CB, no LEP": [f"{CB},when=epilogue,error-feedback=off"],
    "CB of all, rank 4, LEP": ["pp-backward=lowrank,rank=4,error-feedback=lazy"],
    "CB of all, rank 4, LEP of means": ["pp-backward=lowrank,rank=4,error-feedback=lazy-mean"],
    "CB of all, rank 4, no LEP": ["pp-backward=lowrank,rank=4,error-feedback=off"],
    "CB+FE": [MEAN, "embedding=fused"],
    "CB+FE+SC": [MEAN, "embedding=fused", SC],
    "Radius d=0.5": [f"{RADIUS},density=0.5"],
    "Radius d=0.1": [f"{RADIUS},density=0.1"],
    "Radius d=0.01": [f"{RADIUS},density=0.01"],
    "delta fw4/bw8": ["pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8"],
    "delta fw2/bw4": ["pp-forward=delta,bits=2", "pp-backward=fixpoint,bits=4"],
    "delta by token fw4/bw8": ["pp-forward=delta,predict=token,bits=4", "pp-backward=fixpoint,bits=8"],
    "delta by token fw2/bw8": ["pp-forward=delta,predict=token,bits=2", "pp-backward=fixpoint,bits=8"],
    "fixpoint fw4/bw8": ["pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8"],
    "fixpoint fw2/bw4": ["pp-forward=fixpoint,bits=2", "pp-backward=fixpoint,bits=4"],
    "CB+FE, delta fw4, Radius d=0.1": [MEAN, "embedding=fused", "pp-forward=delta,bits=4", f"{RADIUS},density=0.1"],
}

VOCAB_SIZE = 1024
MODEL: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "position-embedding-type": "rope",
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "pipeline-model-parallel-size": 2,
    "micro-batch-size": 2,
    "global-batch-size": 16,
    "sample-order": "fixed",
    "lr": 3e-3,
    "min-lr": 3e-4,
    "lr-decay-style": "cosine",
    "lr-warmup-iters": 40,
    "weight-decay": 0.1,
    "adam-beta2": 0.999,
    "num-workers": 0,
    "log-interval": 20,
    "eval-iters": 100,
    "distributed-backend": "gloo",
}


def run(command: list[str], log: Path, threads: int = 1) -> None:
    """Runs a command of this project, its output in a file.

    Raises:
        SystemExit: when it fails, with the end of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([sys.executable, *command], cwd=REPO, stdout=file, stderr=subprocess.STDOUT, env=env)
    if done.returncode:
        sys.exit(f"error: {' '.join(command[:3])} failed; see {log}\n{log.read_text()[-2000:]}")


def tokenizer_flags(out: Path) -> list[str]:
    vocab = out / "vocabulary"
    files = ["--vocab-file", str(vocab / "vocab.json"), "--merge-file", str(vocab / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]


def prepare(out: Path, train_bytes: int) -> None:
    """Writes corpus, vocabulary and token files, unless they are there."""
    data, logs = out / "data", out / "logs"
    if (data / "done").exists():
        return
    run(["tools/quickstart/make_corpus.py", "--output-dir", str(out / "corpus")], logs / "corpus.log")
    source = out / "corpus" / "train.jsonl"
    vocabulary = ["--vocab-size", str(VOCAB_SIZE), "--output-dir", str(out / "vocabulary")]
    run(["tools/train_vocab.py", "--input", str(source), *vocabulary], logs / "vocabulary.log")
    data.mkdir(parents=True, exist_ok=True)
    taken = 0
    with open(source, encoding="utf-8") as lines, open(data / "train.jsonl", "w", encoding="utf-8") as file:
        for line in lines:
            if taken < train_bytes:
                file.write(line)
                taken += len(line)
    for part, text in (("train", data / "train.jsonl"), ("heldout", out / "corpus" / "heldout.jsonl")):
        files = ["--input", str(text), "--output-prefix", str(data / part)]
        run(["tools/preprocess_data.py", *files, *tokenizer_flags(out), "--append-eod"], logs / f"{part}.log")
    (data / "done").touch()


def slug(case: str) -> str:
    return "".join(c if c.isalnum() or c in ".+-" else "_" for c in case)


def log_of(out: Path, case: str, seed: int, iterations: int) -> Path:
    return out / "runs" / f"{slug(case)}-{seed}-{iterations}.jsonl"


def continued(log: Path) -> Path:
    """The result line of the task CONTINUATION for the run that wrote a log."""
    return log.with_suffix(".continuation")


def train(out: Path, case: str, seed: int, iterations: int) -> None:
    """Trains one case with one seed, and measures its continuations, unless both are done."""
    log = log_of(out, case, seed, iterations)
    if continued(log).exists() and any(event.get("kind") == "test" for event in read_records(log)):
        return
    log.unlink(missing_ok=True)
    print(f"{case}, seed {seed} ...", flush=True)
    values = {**MODEL, "seed": seed, "train-iters": iterations, "eval-interval": max(iterations // 8, 1)}
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    for spec in CASES[case]:
        flags += ["--compress", spec]
    data = out / "data"
    flags += ["--train-data-path", str(data / "train_text_document"), "--log-json-file", str(log)]
    flags += [f"--{part}-data-path={data / 'heldout_text_document'}" for part in ("valid", "test")]
    saved = out / "checkpoints" / log.stem
    shutil.rmtree(saved, ignore_errors=True)
    flags += ["--save", str(saved), "--no-save-optim"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "pretrain_gpt.py"]
    run([*launcher, *flags, *tokenizer_flags(out)], out / "logs" / f"{log.stem}.log")
    task = ["tasks/main.py", "--task", "CONTINUATION", "--load", str(saved), "--micro-batch-size", "64"]
    places = ["--prompt-tokens", "48", "--continuation-tokens", "4"]
    text = ["--valid-data", str(out / "corpus" / "heldout.jsonl")]
    printed = out / "logs" / f"{log.stem}.continuation.log"
    run([*task, *places, *text], printed, threads=2)
    continued(log).write_text(next(line for line in printed.read_text().splitlines() if "exact match" in line))


def final_loss(events: Sequence[Mapping[str, Any]]) -> float:
    return float(next(event["lm_loss"] for event in reversed(events) if event.get("kind") == "test"))


def continuation_figures(log: Path) -> tuple[float, float] | None:
    """Exact match and ranking accuracy of a run's continuations, in percent; None where they were not measured."""
    text = continued(log).read_text() if continued(log).exists() else ""
    found = re.search(r"exact match: (\S+) .* ranking accuracy: (\S+) ", text)
    return (100 * float(found[1]), 100 * float(found[2])) if found else None


def bytes_per_iteration(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean bytes over all iterations, by point."""
    trained = [event["comm"] for event in events if event.get("kind") == "train"]
    points = sorted({point for comm in trained for point in comm} - {"control"})
    return {p: statistics.fmean(comm.get(p, {}).get("wire_bytes", 0.0) for comm in trained) for p in points}


POINTS = ("pp-forward", "pp-backward", "dp-grad", "embedding")


def outcomes(out: Path, cases: list[str], seeds: list[int], iterations: int) -> list[Outcome]:
    """Outcomes of the finished runs."""
    found = []
    dense: dict[int, float] = {}
    for case in cases:
        logs = {seed: log_of(out, case, seed, iterations) for seed in seeds}
        runs = {seed: read_records(log) for seed, log in logs.items() if log.exists()}
        losses = {seed: final_loss(run) for seed, run in runs.items() if any(e["kind"] == "test" for e in run)}
        if not losses:
            continue
        dense = losses if case == "dense" else dense
        versus = [losses[seed] / dense[seed] - 1 for seed in losses if seed in dense]
        sent = [bytes_per_iteration(runs[seed]) for seed in losses]
        means = {point: statistics.fmean(one.get(point, 0.0) for one in sent) / 1000 for point in POINTS}
        spread = statistics.stdev(losses.values()) if len(losses) > 1 else 0.0
        worse = 100 * statistics.fmean(versus) if versus else None
        quality = [figures for seed in losses if (figures := continuation_figures(logs[seed]))]
        exact, ranked = (statistics.fmean(column) for column in zip(*quality, strict=True)) if quality else (None, None)
        found.append(Outcome(case, statistics.fmean(losses.values()), spread, worse, means, len(losses), exact, ranked))
    return found


def table(found: Sequence[Outcome]) -> str:
    """The results as Markdown."""
    heads = ["case", "seeds", "validation loss", "vs dense", *(f"{point} kB" for point in POINTS), "total kB"]
    heads += ["continued exactly", "ranked first"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for one in found:
        change = "" if one.worse is None else f"{one.worse:+.2f}%"
        columns = [one.sent[point] for point in POINTS]
        cells = [one.case, str(one.seeds), f"{one.loss:.4f} ± {one.spread:.4f}", change]
        cells += [f"{column:.1f}" for column in columns] + [f"{sum(columns):.1f}"]
        cells += ["" if share is None else f"{share:.2f}%" for share in (one.exact, one.ranked)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(out: Path, cases: list[str], seeds: list[int], iterations: int) -> dict[str, dict[int, float]]:
    """Validation losses during training, means over the seeds that have them."""
    means: dict[str, dict[int, float]] = {}
    for case in cases:
        points: dict[int, list[float]] = {}
        for seed in seeds:
            log = log_of(out, case, seed, iterations)
            for event in read_records(log) if log.exists() else []:
                if event["kind"] == "validation" and not of_final_draw(event):
                    points.setdefault(event.iteration(), []).append(event.number("lm_loss"))
        # A mean over fewer seeds is one of other runs.
        most = max(map(len, points.values()), default=0)
        if points:
            means[case] = {place: statistics.fmean(own) for place, own in points.items() if len(own) == most}
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("bench_out/convergence")
    parser.add_argument("--out", type=Path, default=folder, help=f"folder of data and logs ({folder})")
    parser.add_argument("--cases", default=None, help=f"separated by semicolons, of: {'; '.join(CASES)} (all)")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (1,2,3)")
    parser.add_argument("--iterations", type=int, default=1000, help="of each run (1000)")
    parser.add_argument(
        "--train-bytes", type=int, default=1_200_000, help="text to train on; less means more epochs (1200000)"
    )
    parser.add_argument("--table", action="store_true", help="only print the table of what is finished")
    options = parser.parse_args()
    names = [part.strip() for part in options.cases.split(";")] if options.cases else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"--cases: no case is named {unknown[0]!r}; the choices are: {'; '.join(CASES)}")
    out, seeds = options.out.resolve(), [int(seed) for seed in options.seeds.split(",")]
    if not options.table:
        prepare(out, options.train_bytes)
        for seed in seeds:
            for case in names:
                train(out, case, seed, options.iterations)
    found = outcomes(out, names, seeds, options.iterations)
    text = table(found)
    print(text)
    (out / "table.md").write_text(text + "\n")
    (out / "table.json").write_text(json.dumps({"iterations": options.iterations, "seeds": seeds}))
    draw_outcomes(found, out / "convergence.png")
    draw_curves(curves(out, names, seeds, options.iterations), out / "curves.png")


if __name__ == "__main__":
    main()
