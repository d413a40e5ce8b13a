"""Times, bytes and losses of the benchmark of islands, from logs of its runs; its tables and plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.lab.hosts import FRAME
from benchmarks.loss_curves import main as plot_loss_curves
from benchmarks.loss_curves import reached
from benchmarks.loss_logs import read_run
from benchmarks.network.islands_cases import IslandsRun, Links
from benchmarks.record import device_name, header, write_record
from benchmarks.tables import Column, Table
from megatron.training.records import read_records

SEGMENT, EMPTY = 1448, 66
"""Bytes of the payload of a full frame, and of the frame that acknowledges two of them."""


def phases(log: Path, run: IslandsRun) -> list[tuple[float, float]]:
    """Seconds of each iteration, and bytes that a host sends to the other in it, by the ledger.

    Args:
        log: a log of every iteration: of the first island, whose ranks are on one host, or of a world of all hosts.
        run: what it is of.
    """
    point, share = ("outer", 1) if run.case.has_islands else ("dp-grad", run.hosts)
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


def dp_pace(log: Path, run: IslandsRun) -> Pace:
    """The pace of steps that are all alike, without the first one."""
    rows = phases(log, run)[1:]
    return replace(_mean(rows), seconds=statistics.median(s for s, _ in rows))


def local_pace(log: Path, run: IslandsRun) -> Pace:
    """The pace of local steps: a whole round, without the first step."""
    return _mean(phases(log, run)[1 : run.case.every + 1])


@dataclass(frozen=True)
class IslandsRow:
    """A run of a case on links.

    Args:
        case: its name.
        seed: its seed.
        links: name of the links.
        measured: whether the whole run was on these links; else its times are computed from paces.
        log: its log, with the times of these links.
        in_step, local: seconds of an iteration before the first local step, and from there on.
        in_step_mb, local_mb: megabytes that a host sends in an iteration, by the ledger.
        counted_mb, ledger_mb: megabytes that a host has sent in the whole run, by its interface and by the ledger.
        iterations, minutes: of the whole run.
        loss: the last validation loss.
        goal: the baseline's.
        after: iterations to the goal; None when it was not reached.
        goal_minutes: minutes to the goal.
        times: the baseline's minutes to the goal over these.
    """

    case: str
    seed: int
    links: str
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

    @staticmethod
    def of(
        run: IslandsRun,
        links: Links,
        counted: dict[str, float],
        paces: tuple[Pace | None, Pace | None] | None,
    ) -> IslandsRow:
        """What a run shows.

        Args:
            run: the whole run.
            links: the links.
            counted: bytes by the interface and by the ledger.
            paces: paces on these links; None where the whole run was on them.
        """
        log, begun = run.log, run.case.steps_in_step(run.iterations)
        first, local = _paces_of(run, begun) if paces is None else paces
        if paces is not None:
            log = _timed_anew(log, begun, first, local, runs.slug(links.name))
        curves = read_run(f"run={log}", None)
        (in_step, in_step_mb), (seconds, mb) = (
            (None, None) if pace is None else (pace.seconds, pace.mb) for pace in (first, local)
        )
        return IslandsRow(
            run.case.name, run.seed, links.name, paces is None, str(log),
            in_step, in_step_mb, seconds, mb, counted["counter"] / 1e6, counted["ledger"] / 1e6, run.iterations,
            60 * curves.train[-1].hours, curves.valid[-1].loss,
        )  # fmt: skip

    def line(self) -> str:
        """A line of progress."""
        paces = ", then ".join(f"{seconds:.2f} s" for seconds in (self.in_step, self.local) if seconds is not None)
        how = "" if self.measured else " (computed)"
        return (
            f"{self.links}: {self.case}, seed {self.seed}: {paces} an iteration; {self.minutes:.1f} "
            f"minutes{how}, validation loss {self.loss:.4f}"
        )


def _paces_of(run: IslandsRun, begun: int) -> tuple[Pace | None, Pace | None]:
    """The paces of a whole run."""
    if not run.case.has_islands:
        return dp_pace(run.log, run), None
    rows = phases(run.log, run)
    first = rows[:begun][1:] or rows[:begun]
    # The first local step of a run that begins with one has further work.
    rows = rows[max(begun, 1) :]
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
    """The same with the times at which each had the baseline's last validation loss, on its links with its seed."""
    bases = {(one.links, one.seed): one for one in found if one.case == baseline}
    whole = []
    for one in found:
        theirs = bases[one.links, one.seed]
        points = [reached(read_run(f"run={each.log}", None).valid, theirs.loss) for each in (one, theirs)]
        own, base = points
        if own is None or base is None:
            whole.append(replace(one, goal=theirs.loss))
        else:
            times = base.hours / own.hours
            whole.append(replace(one, goal=theirs.loss, after=own.iteration, goal_minutes=60 * own.hours, times=times))
    return whole


def over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each case on the same links: means over its seeds, times over those that had the loss."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        above = [row["loss"] / row["goal"] - 1 for row in own]
        means = {
            name: statistics.fmean(row[name] for row in own) for name in ("loss", "minutes", "counted_mb", "ledger_mb")
        }
        reached = [row for row in own if row["times"] is not None]
        times = {
            name: statistics.fmean(row[name] for row in reached) if reached else None
            for name in ("after", "goal_minutes", "times")
        }
        seeds = {"reached": f"{len(reached)} of {len(own)}", "above": statistics.fmean(above)}
        spread = {"spread": f"{min(above):+.2%} to {max(above):+.2%}" if len(own) > 1 else None}
        found.append({**own[0], **means, **times, **seeds, **spread})
    return found


def framed(ledger_mb: float) -> float:
    """Megabytes that an interface counts for a payload: its frames, and those that acknowledge as many from there."""
    return ledger_mb * (FRAME + EMPTY / 2) / SEGMENT


TABLE = Table(
    Column("case", "case"),
    Column("s / iteration, first", "in_step", ".2f"),
    Column("MB", "in_step_mb", ".3f"),
    Column("local", "local", ".3f"),
    Column("MB", "local_mb", ".3f"),
    Column("counter / ledger", lambda row: row["counted_mb"] / framed(row["ledger_mb"]), ".3f"),
    Column("iterations", "iterations"),
    Column("validation loss", "loss", ".4f"),
    Column("above DP", "above", "+.2%"),
    Column("of seeds", "spread"),
    Column("minutes", "minutes", ".1f"),
    Column("runs that reach its loss", "reached"),
    Column("after iterations", "after", ".0f"),
    Column("minutes", "goal_minutes", ".2f"),
    Column("x DP bf16", "times", ".1f"),
    Column("times are", lambda row: "measured" if row["measured"] else "computed"),
)
PEERS = Table(
    Column("step without pipeline stages", "case"),
    Column("s / step", "seconds", ".2f"),
    Column("MB a host", "counted_mb", ".2f"),
)


def write(found: Sequence[IslandsRow], peers: Sequence[dict[str, Any]], out: Path, baseline: str) -> str:
    """Writes tables, curves of the first seed, and every figure to a folder; returns the tables."""
    rows = [asdict(one) for one in found]
    sections = []
    for links in dict.fromkeys(one.links for one in found):
        own = [row for row in rows if row["links"] == links]
        goals = ", ".join(f"{goal:.4f}" for goal in dict.fromkeys(row["goal"] for row in own))
        cases = over_seeds(own)
        sections += [f"### {links}; the loss is {goals}", TABLE.filled(cases).text(cases)]
        theirs = [row for row in peers if row["links"] == links]
        sections += [PEERS.text(theirs)] if theirs else []
        first = [row for row in own if row["seed"] == own[0]["seed"]]
        words = [f"{row['case'].replace('=', ' ')}={row['log']}" for row in first]
        picture = str(out / f"islands-{runs.slug(links)}.png")
        plot_loss_curves([*words, "--baseline", baseline, "--x", "iterations,hours", "--smooth", "10", "-o", picture])
    text = "\n\n".join(sections)
    (out / "table.md").write_text(text + "\n")
    write_record(out / "rows.json", header(device_name("cpu")), rows=rows, peers=list(peers))
    return text
