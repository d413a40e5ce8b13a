"""Runs of ``--compress auto`` beside uncompressed twins of the same seeds: what its choices cost in loss. Linux, root.

    python -m benchmarks.budget                                     all rows and seeds; finished runs are kept
    python -m benchmarks.budget --rows '2 tensors; 2 replicas, 0.2%' --seeds 2,3
    python -m benchmarks.budget --table                             only print the table of finished runs

A run has a host for each rank, in a network namespace, whose links are slow until it has chosen and unshaped from then
on; its twin is one process. Prints for each run what it chose, and how far its final validation loss is above the
twin's.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import join_for_help, parse_names, runs
from benchmarks.convergence_cases import SMALL_RUN
from benchmarks.lab.hosts import Lab, check_permission, run_with_hosts
from megatron.base.markdown import markdown_table
from megatron.training.records import read_records

TRAINING: dict[str, Any] = {
    **SMALL_RUN,
    "micro-batch-size": 4,
    "train-iters": 240,
    "lr-warmup-iters": 20,
    "eval-interval": 240,
}
WIDE: dict[str, Any] = {"num-layers": 2, "hidden-size": 64, "lr": 3e-3, "min-lr": 3e-4}
DEEP: dict[str, Any] = {"num-layers": 6, "hidden-size": 32, "lr": 6e-3, "min-lr": 6e-4}
GATED: dict[str, Any] = {
    **WIDE,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
}
GROUPED: dict[str, Any] = {**WIDE, "group-query-attention": True, "num-query-groups": 2}
LONG: dict[str, Any] = {**WIDE, "seq-length": 128, "max-position-embeddings": 128}
MUON: dict[str, Any] = {**WIDE, "optimizer": "muon", "lr": 1e-3, "min-lr": 1e-4}
HALF_PRECISION: dict[str, Any] = {**WIDE, "bf16": True}
FOUR_LAYERS: dict[str, Any] = {**WIDE, "num-layers": 4}
WITH_EXPERTS: dict[str, Any] = {"num-experts": 8, "moe-ffn-hidden-size": 128, "moe-aux-loss-coeff": 0.01}
SHARDED: dict[str, Any] = {"use-distributed-optimizer": True}
STAGES: dict[str, Any] = {"pipeline-model-parallel-size": 2}
TENSORS: dict[str, Any] = {"tensor-model-parallel-size": 2}


@dataclass(frozen=True)
class Row:
    """Settings of a run.

    Args:
        budget: ``--max-loss-increase``, in percent.
        layout: flags that its twin does not have.
        model: flags of the model.
        hosts: number of hosts, each with a rank.
        rate: bits per second of their links until the run has chosen.
    """

    budget: float
    layout: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=lambda: WIDE)
    hosts: int = 2
    rate: int = 1_000_000


ROWS = {
    "2 replicas, 0.2%": Row(0.2),
    "2 replicas, 1%": Row(1.0),
    "2 replicas, sharded, 0.5%": Row(0.5, SHARDED),
    "2 replicas, sharded, 2%": Row(2.0, SHARDED),
    "2 stages, 0.5%": Row(0.5, STAGES),
    "2 stages, 2%": Row(2.0, STAGES),
    "2 stages x 2 replicas, 0.2%": Row(0.2, STAGES, hosts=4),
    "2 stages x 2 replicas, 1%": Row(1.0, STAGES, hosts=4),
    "deep, 2 replicas, 0.5%": Row(0.5, model=DEEP),
    "gated, 2 replicas, 1%": Row(1.0, model=GATED),
    "grouped queries, 2 replicas, sharded, 1%": Row(1.0, SHARDED, GROUPED),
    "long, 2 stages, 1%": Row(1.0, STAGES, LONG),
    "muon, 2 replicas, 1%": Row(1.0, model=MUON),
    "bf16, 2 replicas, 0.5%": Row(0.5, model=HALF_PRECISION),
    "4 replicas, 1%": Row(1.0, hosts=4),
    "4 stages, 2%": Row(2.0, {"pipeline-model-parallel-size": 4}, FOUR_LAYERS, hosts=4),
    "2 tensors, 0.5%": Row(0.5, TENSORS),
    "2 tensors, 2%": Row(2.0, TENSORS),
    "2 expert ranks, 0.5%": Row(0.5, {"expert-model-parallel-size": 2}, WIDE | WITH_EXPERTS),
    "2 expert ranks, 2%": Row(2.0, {"expert-model-parallel-size": 2}, WIDE | WITH_EXPERTS),
}


def paths_of(out: Path, name: str, seed: int) -> tuple[Path, Path]:
    """Log and output of a row's run; those of its twin have the model's name."""
    stem = f"{runs.slug(name)}-{seed}"
    return out / "runs" / f"{stem}.jsonl", out / "logs" / f"{stem}.log"


def twin_of(row: Row) -> str:
    """Name of a row's uncompressed twin."""
    others = "".join(f", {name}" for name in row.model if name not in WIDE)
    return f"twin {row.model['num-layers']}x{row.model['hidden-size']}{others}"


def train_twin(out: Path, row: Row, seed: int) -> None:
    """Train a row's model without compressors on one process, unless that is done."""
    log, output = paths_of(out, twin_of(row), seed)
    if not runs.has_ended(log):
        flags = runs.flags({**TRAINING, **row.model, "seed": seed}, [], out, log)
        runs.train(flags, f"{twin_of(row)}, seed {seed}", log, output, ranks=1)


def train_auto(out: Path, name: str, seed: int) -> None:
    """Train a row with ``--compress auto`` on hosts with slow links, unless that is done.

    Raises:
        SystemExit: when it fails, with the end of its output.
    """
    row, (log, output) = ROWS[name], paths_of(out, name, seed)
    if runs.has_ended(log):
        return
    print(f"{name}, seed {seed} ...", flush=True)
    log.unlink(missing_ok=True)
    values = {**TRAINING, **row.model, **row.layout, "seed": seed, "max-loss-increase": row.budget}
    flags = runs.flags(values, ["auto"], out, log)
    with Lab([row.rate] * row.hosts) as lab, runs.output_to(output):
        threading.Thread(target=_speed_up, args=[lab, output], daemon=True).start()
        status = lab.run(["pretrain_gpt.py", *flags], timeout=600)
    if status:
        sys.exit(f"error: {name}, seed {seed} failed; see {output}\n{output.read_text()[-2000:]}")


def _speed_up(lab: Lab, output: Path) -> None:
    """Remove the limits of the links once a run has chosen."""
    while "measured and chosen in" not in output.read_text():
        time.sleep(0.1)
    for host in range(len(lab.rates)):
        lab.shape(host, None)


def table(out: Path, names: Sequence[str], seeds: Sequence[int]) -> str:
    """The finished runs as Markdown."""
    rows = []
    for name in names:
        for seed in seeds:
            (log, output), (twin_log, _) = paths_of(out, name, seed), paths_of(out, twin_of(ROWS[name]), seed)
            if not (runs.has_ended(log) and runs.has_ended(twin_log)):
                continue
            events = read_records(log)
            ours, twins = runs.final_loss(events), runs.final_loss(read_records(twin_log))
            chosen = re.findall(r"the same by hand: (.*)", output.read_text())
            eased = sum(event.get("eased") is not None for event in events if event.get("kind") == "loss_check")
            specs = chosen[0].replace("--compress ", "") if chosen else "nothing"
            increase = 100 * (ours / twins - 1)
            verdict = "within" if increase <= ROWS[name].budget else "ABOVE"
            rows.append([name, seed, f"`{specs}`", eased, f"{twins:.4f}", f"{ours:.4f}", f"{increase:+.2f}%", verdict])
    return markdown_table(["row", "seed", "it chose", "eased", "twin", "loss", "above the twin", "budget"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("bench_out/budget")
    parser.add_argument("--out", type=Path, default=folder, help=f"folder of data and logs ({folder})")
    parser.add_argument("--rows", default=None, help=f"separated by semicolons, of: {join_for_help(ROWS, ';')} (all)")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (1,2,3)")
    parser.add_argument("--table", action="store_true", help="only print the table of finished runs")
    options = parser.parse_args()
    names, seeds = parse_names(parser, "--rows", options.rows, ROWS, ";"), [int(s) for s in options.seeds.split(",")]
    out = options.out.resolve()

    def train_all() -> int:
        check_permission()
        runs.prepare(out, 1_200_000)
        for seed in seeds:
            for name in names:
                train_twin(out, ROWS[name], seed)
                train_auto(out, name, seed)
        return 0

    status = 0 if options.table else run_with_hosts("budget", train_all)
    print(table(out, names, seeds))
    sys.exit(status)


if __name__ == "__main__":
    main()
