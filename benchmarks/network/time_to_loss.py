"""Trains to the same losses over slow links, uncompressed and compressed, and draws the losses over time.

    sudo make bench-time-to-loss                      about a quarter of an hour
    sudo make bench-time-to-loss ARGS="--iterations 100"

Each of four hosts (network namespaces with their shares of the processors) holds a pipeline stage. Their links have the
ratio of communication to computation of AQ-SGD's eight V100 at --link, as in bench-network. Every case is a whole run
of pretrain_gpt.py on the quickstart's text, for several epochs. Writes logs, a plot and a table to --out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import REPO, join_for_help, parse_names, runs
from benchmarks.convergence_cases import MODEL
from benchmarks.lab.hosts import Lab, LabError, run_with_hosts
from benchmarks.loss_curves import main as plot_loss_curves
from benchmarks.network.cases import PIPELINE, NetworkCase
from benchmarks.network.run import rate_text, shape_links
from benchmarks.network.setups import aqsgd_pipeline
from megatron.training.records import read_records

HOSTS = 4
MICRO_BATCHES = 8
SHAPE = {"hidden-size": 128, "num-attention-heads": 4, "seq-length": 128, "max-position-embeddings": 128}
PROBE_ITERATIONS = 10
TRAIN_BYTES = 400_000
DEFAULT_CASES = ("fp32 traffic", "bf16 traffic", "delta 4, fixpoint 8 (AQ-SGD)", "delta 4, fixpoint 8, eager 1F1B")


def flags(out: Path, case: NetworkCase, iterations: int, log: Path) -> list[str]:
    """Return the command line of a run."""
    values = {
        **MODEL,
        **SHAPE,
        "pipeline-model-parallel-size": HOSTS,
        "global-batch-size": MICRO_BATCHES * MODEL["micro-batch-size"],
        "pipeline-schedule": case.schedule,
        "train-iters": iterations,
        "lr-warmup-iters": max(iterations // 10, 1),
        "eval-interval": max(iterations // 12, 1),
        "eval-iters": 20,
        "log-interval": 5,
        "seed": 1,
    }
    return [str(REPO / "pretrain_gpt.py"), *runs.flags(values, case.specs, out, log)]


def train(lab: Lab, out: Path, case: NetworkCase, iterations: int, log: Path) -> float:
    """Run a training on the hosts, from the beginning; return the median seconds of an iteration.

    Raises:
        LabError: when it fails.
    """
    log.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    status = lab.run(flags(out, case, iterations, log))
    if status:
        raise LabError(f"{case.name}: the run ended with status {status}; its messages are above")
    return statistics.median(e["seconds_per_iteration"] for e in read_records(log) if e.get("kind") == "train")


def compare(out: Path, cases: Sequence[NetworkCase], link: str, iterations: int) -> int:
    """Run the cases and draw their curves.

    Raises:
        LabError: when hosts cannot be created, or a run fails.
    """
    runs.prepare(out, TRAIN_BYTES)
    (setup,) = (setup for setup in aqsgd_pipeline() if setup.name == f"AQ-SGD {link}")
    logs = {case.name: out / "runs" / f"{runs.slug(case.name)}-{iterations}.jsonl" for case in cases}
    with Lab([None] * HOSTS, (os.cpu_count() or 1) / HOSTS) as lab:
        seconds = train(lab, out, cases[0], PROBE_ITERATIONS, out / "runs" / "unshaped.jsonl")
        computed = seconds / (MICRO_BATCHES + HOSTS - 1)  # 1F1B takes the time of M + P - 1 micro-batches
        message = SHAPE["seq-length"] * MODEL["micro-batch-size"] * SHAPE["hidden-size"] * 32
        rate = message / (setup.ratio * computed)
        ratio = f"ratio {setup.ratio:.3f}, here {rate_text(rate)}"
        print(f"a micro-batch computes for {1e3 * computed:.0f} ms; {setup.arithmetic}; {ratio}", flush=True)
        shape_links(lab, rate)
        for case in cases:
            seconds = train(lab, out, case, iterations, logs[case.name])
            print(f"{case.name}: {seconds:.2f} s an iteration", flush=True)
    words = [f"{name}={log}" for name, log in logs.items()]
    picture = str(out / "time-to-loss.png")
    return plot_loss_curves(
        [*words, "--baseline", cases[0].name, "--x", "iterations,hours", "--smooth", "5", "-o", picture]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    links = [setup.name.removeprefix("AQ-SGD ") for setup in aqsgd_pipeline()]
    parser.add_argument("--link", choices=links, default="100 Mb/s", help="published link to imitate (100 Mb/s)")
    cases = {case.name: case for case in PIPELINE}
    parser.add_argument("--cases", help=f"separated by semicolons, of: {join_for_help(cases, ';')}")
    parser.add_argument("--iterations", type=int, default=240, help="iterations of each run (240)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/time-to-loss"), help="folder of all results")
    options = parser.parse_args()
    names = parse_names(parser, "--cases", options.cases or ";".join(DEFAULT_CASES), cases, ";")
    if options.iterations < PROBE_ITERATIONS:
        parser.error(f"--iterations {options.iterations}: give at least {PROBE_ITERATIONS}")
    chosen_cases = [cases[name] for name in names]
    return run_with_hosts(
        "bench-time-to-loss", lambda: compare(options.out.resolve(), chosen_cases, options.link, options.iterations)
    )


if __name__ == "__main__":
    sys.exit(main())
