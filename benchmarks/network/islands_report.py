"""Times, bytes and losses of the benchmark of islands, from logs of its runs; its tables and plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lab.command import describe
from benchmarks.lab.hosts import FRAME
from benchmarks.loss_curves import main as plot_loss_curves
from benchmarks.loss_curves import reached
from benchmarks.loss_logs import read_run
from benchmarks.network.islands_cases import HOSTS, IslandsCase
from benchmarks.record import device_name, header, write_record
from benchmarks.tables import Column, Table
from megatron.training.records import read_records

SEGMENT, EMPTY = 1448, 66
"""Bytes of the payload of a full frame, and of the frame that acknowledges two of them."""


def phases(log: Path, islands: bool) -> list[tuple[float, float]]:
    """Seconds of each iteration, and bytes that a host sends to the other in it, by the ledger.

    Args:
        log: a log of every iteration: of the first island, whose ranks are on one host, or of a world of both hosts.
        islands: which of the two.
    """
    point, share = ("outer", 1) if islands else ("dp-grad", HOSTS)
    return [
        (event.number("seconds_per_iteration"), event["comm"].get(point, {}).get("wire_bytes", 0.0) / share)
        for event in read_records(log)
        if event.get("kind") == "train"
    ]


@dataclass(frozen=True)
class Pace:
    """Seconds of an iteration, and megabytes that a host sends in it, by the ledger."""

    seconds: float
    mb: float


def _mean(rows: Sequence[tuple[float, float]]) -> Pace:
    return Pace(statistics.fmean(s for s, _ in rows), statistics.fmean(sent for _, sent in rows) / 1e6)


def dp_pace(log: Path, islands: bool) -> Pace:
    """The pace of steps that are all alike, without the first one."""
    rows = phases(log, islands)[1:]
    return replace(_mean(rows), seconds=statistics.median(s for s, _ in rows))


def local_pace(log: Path, islands: bool, every: int) -> Pace:
    """The pace of local steps: a whole round, without the first step."""
    return _mean(phases(log, islands)[1 : every + 1])


@dataclass(frozen=True)
class IslandsRow:
    """A case on a link.

    Args:
        case: its name.
        rate: bits per second of the link.
        measured: whether the whole run was on this link; else its times are computed from paces.
        log: its log, with the times of this link.
        in_step, local: seconds of an iteration before the first local step, and from there on.
        in_step_mb, local_mb: megabytes that a host sends in an iteration, by the ledger.
        counted_mb, ledger_mb: megabytes that a host has sent in the whole run, by its interface and by the ledger.
        iterations, minutes: of the whole run.
        loss: the last validation loss.
        goal: the baseline's.
        after: iterations to the goal; None when it was not reached.
        goal_minutes: minutes to the goal.
        times: the baseline's minutes to the goal over these.
        planned_in_step, planned_local: the planner's seconds of an iteration.
    """

    case: str
    rate: int
    measured: bool
    log: str
    in_step: float | None
    in_step_mb: float | None
    local: float | None
    local_mb: float | None
    counted_mb: float
    ledger_mb: float
    iterations: int
    minutes: float
    loss: float
    goal: float | None = None
    after: int | None = None
    goal_minutes: float | None = None
    times: float | None = None
    planned_in_step: float | None = None
    planned_local: float | None = None

    @staticmethod
    def of(
        case: IslandsCase,
        iterations: int,
        rate: int,
        log: Path,
        counted: dict[str, float],
        paces: tuple[Pace | None, Pace | None] | None,
    ) -> IslandsRow:
        """What a run shows.

        Args:
            case, iterations: what was run.
            rate: the link.
            log: log of the whole run.
            counted: bytes by the interface and by the ledger.
            paces: paces on this link; None where the whole run was on it.
        """
        begun = case.steps_in_step(iterations)
        first, local = _paces_of(case, log, begun) if paces is None else paces
        if paces is not None:
            log = _timed_anew(log, begun, first, local, describe(rate))
        curves = read_run(f"run={log}", None)
        (in_step, in_step_mb), (seconds, mb) = (
            (None, None) if pace is None else (pace.seconds, pace.mb) for pace in (first, local)
        )
        return IslandsRow(
            case.name, rate, paces is None, str(log), in_step, in_step_mb, seconds, mb,
            counted["counter"] / 1e6, counted["ledger"] / 1e6, iterations,
            60 * curves.train[-1].hours, curves.valid[-1].loss,
        )  # fmt: skip

    def line(self) -> str:
        """A line of progress."""
        paces = ", then ".join(f"{seconds:.2f} s" for seconds in (self.in_step, self.local) if seconds is not None)
        how = "" if self.measured else " (computed)"
        return (
            f"{describe(self.rate)}: {self.case}: {paces} an iteration; {self.minutes:.1f} "
            f"minutes{how}, validation loss {self.loss:.4f}"
        )


def _paces_of(case: IslandsCase, log: Path, begun: int) -> tuple[Pace | None, Pace | None]:
    """The paces of a whole run."""
    with_islands = phases(log, True)
    if not case.has_islands:
        return dp_pace(log, False), None
    first = with_islands[:begun][1:] or with_islands[:begun]
    # The first local step of a run that begins with one has further work.
    rows = with_islands[max(begun, 1) :]
    if not first:
        return None, _mean(rows)
    return replace(_mean(first), seconds=statistics.median(s for s, _ in first)), _mean(rows)


def _timed_anew(log: Path, begun: int, first: Pace | None, local: Pace | None, name: str) -> Path:
    """Copies a log with the times of another link."""
    target = log.with_name(f"{log.stem}.at-{name}.jsonl")
    lines = []
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "train":
            pace = first if event["iteration"] <= begun or local is None else local
            assert pace is not None
            event["seconds_per_iteration"] = pace.seconds
        lines.append(json.dumps(event))
    target.write_text("\n".join(lines) + "\n")
    return target


def compared(found: Sequence[IslandsRow], baseline: str) -> list[IslandsRow]:
    """The same with the times at which each had the baseline's last validation loss on its link."""
    whole = []
    for one in found:
        theirs = next(each for each in found if each.case == baseline and each.rate == one.rate)
        points = [reached(read_run(f"run={each.log}", None).valid, theirs.loss) for each in (one, theirs)]
        own, base = points
        if own is None or base is None:
            whole.append(replace(one, goal=theirs.loss))
        else:
            times = base.hours / own.hours
            whole.append(replace(one, goal=theirs.loss, after=own.iteration, goal_minutes=60 * own.hours, times=times))
    return whole


def framed(ledger_mb: float) -> float:
    """Megabytes that an interface counts for a payload: its frames, and those that acknowledge as many from there."""
    return ledger_mb * (FRAME + EMPTY / 2) / SEGMENT


TABLE = Table(
    Column("case", "case"),
    Column("s / iteration, first", "in_step", ".2f"),
    Column("planned", "planned_in_step", ".2f"),
    Column("MB", "in_step_mb", ".3f"),
    Column("local", "local", ".3f"),
    Column("planned", "planned_local", ".3f"),
    Column("MB", "local_mb", ".3f"),
    Column("counter / ledger", lambda row: row["counted_mb"] / framed(row["ledger_mb"]), ".3f"),
    Column("iterations", "iterations"),
    Column("validation loss", "loss", ".4f"),
    Column("minutes", "minutes", ".1f"),
    Column("iterations to the loss", lambda row: "never" if row["after"] is None else row["after"]),
    Column("minutes to it", "goal_minutes", ".2f"),
    Column("x DP bf16", "times", ".1f"),
    Column("times are", lambda row: "measured" if row["measured"] else "computed"),
)
PEERS = Table(
    Column("step without pipeline stages", "case"),
    Column("s / step", "seconds", ".2f"),
    Column("MB a host", "counted_mb", ".2f"),
)


def write(found: Sequence[IslandsRow], peers: Sequence[dict[str, Any]], out: Path, baseline: str) -> str:
    """Writes tables, curves and every figure to a folder; returns the tables."""
    rows = [asdict(one) for one in found]
    sections = []
    for rate in dict.fromkeys(one.rate for one in found):
        own = [row for row in rows if row["rate"] == rate]
        heads = [f"### {describe(rate)}; the loss is {own[0]['goal']:.4f}", TABLE.text(own)]
        theirs = [row for row in peers if row["rate"] == rate]
        sections += [*heads, *([PEERS.text(theirs)] if theirs else [])]
        words = [f"{row['case'].replace('=', ' ')}={row['log']}" for row in own]
        picture = str(out / f"islands-{describe(rate)}.png")
        plot_loss_curves([*words, "--baseline", baseline, "--x", "iterations,hours", "--smooth", "10", "-o", picture])
    text = "\n\n".join(sections)
    (out / "table.md").write_text(text + "\n")
    write_record(out / "rows.json", header(device_name("cpu")), rows=rows, peers=list(peers))
    return text
