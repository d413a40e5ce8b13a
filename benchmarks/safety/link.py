"""Speed of a card's runs on hosts with shaped links."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import REPO
from benchmarks.lab.hosts import Lab, LabError
from benchmarks.safety.training import CardRun, record_cost
from megatron.base.atomic import atomic_write
from megatron.training.records import read_records

TURNS = 2
"""Runs of each side; the sides take turns."""


@dataclass(frozen=True)
class LinkSpeed:
    """Speed on a link.

    Args:
        seconds, dense_seconds: median seconds of an iteration, of each turn.
        host_mb, dense_host_mb: MB that the busiest host sends in an iteration, by its interface, start included.
        load: load average of the machine before the first turn.
    """

    seconds: list[float]
    dense_seconds: list[float]
    host_mb: float
    dense_host_mb: float
    load: float

    @property
    def ratio(self) -> float:
        """Speed relative to dense, the median over the turns."""
        pairs = zip(self.dense_seconds, self.seconds, strict=True)
        return statistics.median(dense / seconds for dense, seconds in pairs)


def _take_turn(lab: Lab, run: CardRun, log: Path) -> tuple[float, float]:
    """Median seconds of an iteration, and MB that the busiest host sends in one.

    Raises:
        LabError: when the run fails.
    """
    log.unlink(missing_ok=True)
    before = lab.traffic()
    layout = run.layout
    command = [str(REPO / "pretrain_gpt.py"), *run.flags]
    status = lab.run(command, layout.ranks // len(lab.rates))
    shutil.rmtree(run.checkpoint, ignore_errors=True)
    if status:
        raise LabError(f"a run on the link ended with status {status}; its messages are above")
    sent = max((end - start).sent for end, start in zip(lab.traffic(), before, strict=True))
    windows = [float(r["seconds_per_iteration"]) for r in read_records(log) if r.get("kind") == "train"]
    return statistics.median(windows[1:] or windows), sent / 1e6 / int(run.values["train-iters"])


def hosts_of(run: CardRun) -> int:
    """Number of hosts: a node each, or a rank each on a single node."""
    return run.layout.nodes if run.layout.nodes > 1 else run.layout.ranks


def measure_link(run: CardRun, rate: int | None, output: Path, say: Callable[[str], None]) -> LinkSpeed:
    """Speed of a run and of its dense twin, in turns; from the output file if that exists.

    Raises:
        LabError: when hosts cannot be created, or a run fails.
    """
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        hosts = hosts_of(run)
        turns: Mapping[bool, list[tuple[float, float]]] = {True: [], False: []}
        load = os.getloadavg()[0]
        with record_cost(output.with_suffix(".cost")), Lab([rate] * hosts, (os.cpu_count() or 1) / hosts) as lab:
            for turn in range(TURNS):
                for is_dense in (True, False):
                    say(f"on the link: {'dense' if is_dense else run.text}, turn {turn + 1} of {TURNS}")
                    side = run.dense if is_dense else run
                    turns[is_dense].append(_take_turn(lab, side, side.log))
        seconds, dense_seconds = ([each for each, _ in turns[is_dense]] for is_dense in (False, True))
        host_mb, dense_host_mb = (statistics.median(mb for _, mb in turns[is_dense]) for is_dense in (False, True))
        speed = LinkSpeed(seconds, dense_seconds, host_mb, dense_host_mb, load)
        with atomic_write(output) as stream:
            stream.write(json.dumps(asdict(speed)).encode())
    return LinkSpeed(**json.loads(output.read_text()))


def link_run(run: CardRun, iterations: int) -> CardRun:
    """Copy of a run with few iterations and frequent records, for the link."""
    values = {**run.values, "train-iters": iterations, "log-interval": 5, "eval-iters": 1}
    return replace(run, values=values, title=f"{run.title} on the link")
