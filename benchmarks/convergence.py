"""Trains a small GPT with and without compression and compares validation losses and bytes.

    make bench-convergence                        all cases and seeds; finished ones are kept
    make bench-convergence ARGS="--cases 'dense; CB, LEP' --seeds 1 --table"

Every case trains on the same text, the quickstart's, for several epochs of the same samples, on 2 pipeline stages x 2
replicas; a model with experts on 4 replicas that share them. Afterwards each trained model goes on with held-out text
(the task CONTINUATION): a loss may hide what compression does to that. Prints a table (mean and spread over the seeds)
and writes it with pictures.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import chosen, runs
from benchmarks.convergence_figures import Outcome, draw_curves, draw_outcomes
from benchmarks.record import device_name, header, write_record
from megatron.base.markdown import markdown_table
from megatron.compression.points import EXPERT_POINTS
from megatron.training.plots import of_final_draw
from megatron.training.records import read_records

CB = "pp-backward=lowrank,rank=16"
MEAN = f"{CB},when=epilogue,error-feedback=lazy-mean"
RADIUS = "dp-grad=stable-topk,interval=5,flush=rotate,warmup=200"
SC = "dp-grad=powersgd,rank=16,stages=first:1,warmup=40"
MINMAX = "grid=minmax,scale-dtype=bf16"
POWERSGD = "dp-grad=powersgd,rank=16,warmup=40"

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
    "PowerSGD": [POWERSGD],
    "PowerSGD, factors of 8 bits": [f"{POWERSGD},factors=fixpoint8"],
    "PowerSGD, factors of 4 bits": [f"{POWERSGD},factors=fixpoint4"],
    "Radius d=0.5": [f"{RADIUS},density=0.5"],
    "Radius d=0.1": [f"{RADIUS},density=0.1"],
    "Radius d=0.01": [f"{RADIUS},density=0.01"],
    "delta fw4/bw8": ["pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8"],
    "delta fw2/bw4": ["pp-forward=delta,bits=2", "pp-backward=fixpoint,bits=4"],
    "delta by token fw4/bw8": ["pp-forward=delta,predict=token,bits=4", "pp-backward=fixpoint,bits=8"],
    "delta by token fw2/bw8": ["pp-forward=delta,predict=token,bits=2", "pp-backward=fixpoint,bits=8"],
    "fixpoint fw4/bw8": ["pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8"],
    "fixpoint fw2/bw4": ["pp-forward=fixpoint,bits=2", "pp-backward=fixpoint,bits=4"],
    "fixpoint fw4/bw6": ["pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=6"],
    "fixpoint minmax fw4/bw6": [f"pp-forward=fixpoint,bits=4,{MINMAX}", "pp-backward=fixpoint,bits=6"],
    "fixpoint minmax, rotated, fw4/bw6": [
        f"pp-forward=fixpoint,bits=4,{MINMAX},rotation=64",
        "pp-backward=fixpoint,bits=6",
    ],
    "fixpoint midrise fw2/bw4": ["pp-forward=fixpoint,bits=2,grid=midrise", "pp-backward=fixpoint,bits=4"],
    "fixpoint fw8/bw8": ["pp-forward=fixpoint,bits=8", "pp-backward=fixpoint,bits=8"],
    "float8 fw e4m3/bw e5m2": ["pp-forward=float8", "pp-backward=float8,format=e5m2"],
    "float8 gradients": ["dp-grad=float8"],
    "parameters fixpoint 4, group 2048": ["param-gather=fixpoint,bits=4,group=2048"],
    "parameters float8": ["param-gather=float8"],
    "CB+FE, delta fw4, Radius d=0.1": [MEAN, "embedding=fused", "pp-forward=delta,bits=4", f"{RADIUS},density=0.1"],
}

_EIGHT, _FOUR = "fixpoint,bits=8,group=64", "fixpoint,bits=4,group=64,rotation=64"
EXPERTS = "experts"
"""First word of the cases of a model with experts, whose first one is what the others are compared with."""
CASES |= {
    f"{EXPERTS}, dense": [],
    f"{EXPERTS}, dispatch forward 8": [f"ep-dispatch-forward={_EIGHT}"],
    f"{EXPERTS}, combine backward 8": [f"ep-combine-backward={_EIGHT}"],
    f"{EXPERTS}, combine forward 8": [f"ep-combine-forward={_EIGHT}"],
    f"{EXPERTS}, dispatch backward 8": [f"ep-dispatch-backward={_EIGHT}"],
    f"{EXPERTS}, to the experts 8": [f"ep-dispatch-forward={_EIGHT}", f"ep-combine-backward={_EIGHT}"],
    f"{EXPERTS}, all 8": [f"ep-dispatch={_EIGHT}", f"ep-combine={_EIGHT}"],
    f"{EXPERTS}, to the experts 4, else 8": [
        f"ep-dispatch-forward={_FOUR}",
        f"ep-combine-backward={_FOUR}",
        f"ep-combine-forward={_EIGHT}",
        f"ep-dispatch-backward={_EIGHT}",
    ],
    f"{EXPERTS}, all 4": [f"ep-dispatch={_FOUR}", f"ep-combine={_FOUR}"],
}

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

WITH_EXPERTS: dict[str, Any] = {
    "num-experts": 8,
    "moe-ffn-hidden-size": 128,
    "moe-aux-loss-coeff": 0.01,
    "expert-model-parallel-size": 4,
    "pipeline-model-parallel-size": 1,
}


def baseline(case: str) -> str:
    """The case without compression that another one is compared with."""
    return f"{EXPERTS}, dense" if case.startswith(EXPERTS) else "dense"


def log_of(out: Path, case: str, seed: int, iterations: int) -> Path:
    return out / "runs" / f"{runs.slug(case)}-{seed}-{iterations}.jsonl"


def continued(log: Path) -> Path:
    """The result line of the task CONTINUATION for the run that wrote a log."""
    return log.with_suffix(".continuation")


def is_sharded(case: str) -> bool:
    """Whether a case gathers parameters, which a sharded optimizer alone does."""
    return any(spec.startswith("param-gather=") for spec in CASES[case])


def train(out: Path, case: str, seed: int, iterations: int) -> None:
    """Trains one case with one seed, and measures its continuations, unless both are done."""
    log = log_of(out, case, seed, iterations)
    if continued(log).exists() and runs.has_ended(log):
        return
    log.unlink(missing_ok=True)
    values = {**MODEL, "seed": seed, "train-iters": iterations, "eval-interval": max(iterations // 8, 1)}
    values |= {"use-distributed-optimizer": True} if is_sharded(case) else {}
    values |= WITH_EXPERTS if case.startswith(EXPERTS) else {}
    saved = out / "checkpoints" / log.stem
    shutil.rmtree(saved, ignore_errors=True)
    words = runs.flags({**values, "save": saved, "no-save-optim": True}, CASES[case], out, log)
    runs.train(words, f"{case}, seed {seed}", log, out / "logs" / f"{log.stem}.log", ranks=4)
    task = ["tasks/main.py", "--task", "CONTINUATION", "--load", str(saved), "--micro-batch-size", "64"]
    places = ["--prompt-tokens", "48", "--continuation-tokens", "4"]
    text = ["--valid-data", str(out / "corpus" / "heldout.jsonl")]
    printed = out / "logs" / f"{log.stem}.continuation.log"
    runs.run([*task, *places, *text], printed, threads=2)
    continued(log).write_text(next(line for line in printed.read_text().splitlines() if "exact match" in line))


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


POINTS = ("pp-forward", "pp-backward", "dp-grad", "embedding", "param-gather", *(p.value for p in EXPERT_POINTS))


def outcomes(out: Path, cases: list[str], seeds: list[int], iterations: int) -> list[Outcome]:
    """Outcomes of the finished runs."""
    found = []
    dense: dict[str, dict[int, float]] = {}
    for case in cases:
        logs = {seed: log_of(out, case, seed, iterations) for seed in seeds}
        ended = {seed: read_records(log) for seed, log in logs.items() if runs.has_ended(log)}
        losses = {seed: runs.final_loss(run) for seed, run in ended.items()}
        if not losses:
            continue
        dense.setdefault(baseline(case), losses if case == baseline(case) else {})
        against = dense[baseline(case)]
        versus = [losses[seed] / against[seed] - 1 for seed in losses if seed in against]
        sent = [bytes_per_iteration(run) for run in ended.values()]
        means = {point: statistics.fmean(one.get(point, 0.0) for one in sent) / 1000 for point in POINTS}
        spread = statistics.stdev(losses.values()) if len(losses) > 1 else 0.0
        worse = 100 * statistics.fmean(versus) if versus else None
        quality = [figures for seed in losses if (figures := continuation_figures(logs[seed]))]
        exact, ranked = (statistics.fmean(column) for column in zip(*quality, strict=True)) if quality else (None, None)
        found.append(Outcome(case, statistics.fmean(losses.values()), spread, worse, means, len(losses), exact, ranked))
    return found


def table(found: Sequence[Outcome]) -> str:
    """The results as Markdown."""
    points = [point for point in POINTS if any(one.sent[point] for one in found)]
    heads = ["case", "seeds", "validation loss", "vs dense", *(f"{point} kB" for point in points), "total kB"]
    heads += ["continued exactly", "ranked first"]
    rows = []
    for one in found:
        change = "" if one.worse is None else f"{one.worse:+.2f}%"
        sent = [one.sent[point] for point in points]
        cells = [one.case, one.seeds, f"{one.loss:.4f} ± {one.spread:.4f}", change]
        cells += [f"{kb:.1f}" for kb in (*sent, sum(sent))]
        rows.append([*cells, *("" if share is None else f"{share:.2f}%" for share in (one.exact, one.ranked))])
    return markdown_table(heads, rows)


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
    names = chosen(parser, "--cases", options.cases, CASES, ";")
    out, seeds = options.out.resolve(), [int(seed) for seed in options.seeds.split(",")]
    if not options.table:
        runs.prepare(out, options.train_bytes)
        for seed in seeds:
            for case in names:
                train(out, case, seed, options.iterations)
    found = outcomes(out, names, seeds, options.iterations)
    text = table(found)
    print(text)
    (out / "table.md").write_text(text + "\n")
    made_with = header(device_name("cpu"))
    rows = [asdict(one) for one in found]
    write_record(out / "table.json", made_with, iterations=options.iterations, seeds=seeds, rows=rows)
    draw_outcomes(found, out / "convergence.png")
    draw_curves(curves(out, names, seeds, options.iterations), out / "curves.png")


if __name__ == "__main__":
    main()
