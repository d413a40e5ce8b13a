"""Times the choice of ``--compress auto`` beside the best sets that it could have chosen. Linux, root.

    python -m benchmarks.regret.run                                  all layouts, links and models; finished ones stay
    python -m benchmarks.regret.run --layouts pp4 --links 100mbit    some of them
    python -m benchmarks.regret.run --table                          only print the table of what has been measured

Each host is a network namespace with half a core. In each of them, a run chooses its compressors as in training. Then
all sets within its budget are predicted, and steps with the fastest of them, the chosen set and no compressors are
timed in random order. The regret is the time of the chosen set over that of the fastest, minus one: the mean over the
rounds, each compared with the set that is fastest in the other rounds, because the fastest of equal sets is only lucky.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import parse_names, runs
from benchmarks.budget import WITH_EXPERTS
from benchmarks.convergence_cases import SMALL_RUN
from benchmarks.lab.hosts import Lab, check_permission, run_with_hosts
from megatron.base.markdown import markdown_table

RUN: dict[str, Any] = {
    **SMALL_RUN,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "micro-batch-size": 2,
    "train-iters": 1000,
    "lr": 3e-3,
    "compile": "off",
}
HOSTS, CPUS = 4, 0.5


@dataclass(frozen=True)
class HostLayout:
    """A layout of four hosts.

    Args:
        flags: its flags.
        ranks_per_host: ranks on each host.
    """

    flags: Mapping[str, Any]
    ranks_per_host: int = 1


LAYOUTS = {
    "dp4": HostLayout({"global-batch-size": 16}),
    "pp4": HostLayout({"global-batch-size": 16, "pipeline-model-parallel-size": 4}),
    "3d": HostLayout({"global-batch-size": 16, "pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 2}, 2),
    "ep4": HostLayout({"global-batch-size": 16, "expert-model-parallel-size": 4, **WITH_EXPERTS}),
}
"""Layouts by name; 3d has two tensor-parallel ranks on each host, two stages and two replicas."""
LINKS = {"unshaped": None, "500mbit": 500_000_000, "100mbit": 100_000_000, "30mbit": 30_000_000}
"""Bits per second of a host's link."""
MODELS = {
    "4x256": {"num-layers": 4, "hidden-size": 256},
    "8x192": {"num-layers": 8, "hidden-size": 192},
    "4x384": {"num-layers": 4, "hidden-size": 384},
}
"""Models, as layers x width; none was used to measure the costs in loss."""


def measure_cell(out: Path, layout: str, link: str, model: str, budget: float) -> None:
    """Choose and time the grid, unless that is done.

    Raises:
        SystemExit: when it fails, with the end of its output.
    """
    record = record_of(out, layout, link, model)
    if record.exists():
        return
    print(f"{layout}, {link}, {model} ...", flush=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    values = {**RUN, **MODELS[model], **LAYOUTS[layout].flags, "max-loss-increase": budget}
    output, sets = record.with_suffix(".log"), record.with_suffix(".sets")
    flags = runs.flags(values, ["auto"], out, record.with_suffix(".jsonl"))
    with Lab([LINKS[link]] * HOSTS, cpus=CPUS) as lab, runs.output_to(output):
        command = ["-m", "benchmarks.regret.worker", str(sets), *flags]
        status = lab.run(command, LAYOUTS[layout].ranks_per_host, timeout=600)
    if status:
        sys.exit(f"error: {layout}, {link}, {model} failed; see {output}\n{output.read_text()[-2000:]}")
    choosing_s = re.findall(r"measured and chosen in ([\d.]+) s", output.read_text())[-1]
    record.write_text(json.dumps({**json.loads(sets.read_text()), "choosing_s": float(choosing_s)}))


def record_of(out: Path, layout: str, link: str, model: str) -> Path:
    """File of what was measured."""
    return out / "cells" / f"{layout}-{link}-{model}.json"


def regret_of(sets: Sequence[Mapping[str, Any]]) -> float:
    """Mean share by which the chosen set takes longer than the set that is fastest in the other rounds."""
    (chosen,) = (each["times"] for each in sets if each["is_chosen"])
    ratios = []
    for number, seconds in enumerate(chosen):
        fastest = min(
            (each["times"] for each in sets),
            key=lambda times: statistics.median([*times[:number], *times[number + 1 :]]),
        )
        ratios.append(seconds / fastest[number])
    return statistics.fmean(ratios) - 1


def row_of(record: Mapping[str, Any]) -> list[str]:
    """Cells of a row of the table, from a record."""
    sets: Sequence[Mapping[str, Any]] = record["sets"]
    plain, fastest = sets[0], min(sets, key=lambda each: each["seconds"])
    (chosen,) = (each for each in sets if each["is_chosen"])
    choosing_s = record["choosing_s"]
    errors = [each["predicted_s"] / each["seconds"] - 1 for each in sets]
    return [
        f"{plain['seconds']:.2f}",
        f"{chosen['seconds']:.2f}",
        f"{fastest['seconds']:.2f}",
        f"{100 * regret_of(sets):+.0f}%",
        f"{100 * (chosen['predicted_s'] / chosen['seconds'] - 1):+.0f}%",
        f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f}%",
        f"{choosing_s:.0f} s, {100 * choosing_s / (RUN['train-iters'] * chosen['seconds']):.1f}%",
        f"{len(sets)} of {record['grid']}",
        " ".join(chosen["flags"]).replace("--compress ", "") or "nothing",
    ]


TITLES = ["nothing", "auto", "fastest set", "regret", "prediction of auto's", "of all", "choosing", "timed", "it chose"]


def table(out: Path, layouts: Sequence[str], links: Sequence[str], models: Sequence[str]) -> str:
    """What has been measured, as Markdown; times are the medians of the rounds, in seconds; with the share of the run
    that choosing took."""
    rows = []
    for layout, link, model in itertools.product(layouts, links, models):
        record = record_of(out, layout, link, model)
        if record.exists():
            rows.append([layout, link, model, *row_of(json.loads(record.read_text()))])
    return markdown_table(["layout", "links", "model", *TITLES], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("bench_out/regret")
    parser.add_argument("--out", type=Path, default=folder, help=f"folder of data and records ({folder})")
    parser.add_argument("--layouts", help=f"comma-separated, of: {', '.join(LAYOUTS)} (all)")
    parser.add_argument("--links", help=f"comma-separated, of: {', '.join(LINKS)} (all)")
    parser.add_argument("--models", help=f"comma-separated layers x width, of: {', '.join(MODELS)} (all)")
    parser.add_argument("--budget", type=float, default=0.5, help="--max-loss-increase of the runs, in percent (0.5)")
    parser.add_argument("--table", action="store_true", help="only print the table of what has been measured")
    options = parser.parse_args()
    layouts = parse_names(parser, "--layouts", options.layouts, LAYOUTS)
    links = parse_names(parser, "--links", options.links, LINKS)
    models = parse_names(parser, "--models", options.models, MODELS)
    out = options.out.resolve()

    def measure_all() -> int:
        check_permission()
        runs.prepare(out, 300_000)
        for model, layout, link in itertools.product(models, layouts, links):
            measure_cell(out, layout, link, model, options.budget)
        return 0

    status = 0 if options.table else run_with_hosts("regret", measure_all)
    print(table(out, layouts, links, models))
    sys.exit(status)


if __name__ == "__main__":
    main()
