"""Trains over slow links between hosts, with data parallelism and with islands, to the same loss.

    sudo make bench-islands                                                       about half an hour
    sudo make bench-islands ARGS="--alike --rates 100mbit"                        the ratio of an H100 on such a link
    sudo make bench-islands ARGS="--rates 100mbit --cases 'DP, PowerSGD of rank 16'"
    sudo make bench-islands ARGS="--rates 100mbit/100mbit/20mbit"                 three hosts, one on a slower link

Each host (a network namespace with its share of the processors) holds a pipeline of two stages, whose messages stay
inside the host. Gradients, or the messages of islands, cross the links between the hosts, whose rates are --rates. A
whole run of each case and seed gives the losses, which do not depend on the links. Times are computed: the number of
iterations times the seconds of an iteration, measured on those links over a few iterations. Writes logs, a plot for
each link, a table and every figure to --out; finished runs are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import join_for_help, parse_names, runs
from benchmarks.lab.command import parse_rate
from benchmarks.lab.hosts import Lab, LabError, run_with_hosts
from benchmarks.loss_curves import first_at_loss
from benchmarks.loss_curves import main as plot_loss_curves
from benchmarks.loss_logs import read_run
from benchmarks.network.islands_cases import (
    BASELINE,
    CASES,
    EXACT_WARMUP,
    HOSTS,
    SHAPE,
    IslandsCase,
    IslandsRun,
    Links,
    global_batch,
)
from benchmarks.network.setups import islands_data
from benchmarks.report import Column, Table, device_name, header, write_record
from megatron.data.indexed import IndexedDataset
from megatron.training.records import read_records

TRAIN_BYTES, HELDOUT_BYTES = 1_200_000, 24_000
"""Each evaluation uses the whole held-out text, so that all losses are on the same samples."""
EVALUATIONS = 10
TIMED = 4
"""Iterations that give the seconds of a synchronous iteration."""
TABLE = Table(
    Column("case", "case"),
    Column("s / iteration, first", "warmup", ".2f"),
    Column("MB", "warmup_mb", ".3f"),
    Column("local", "local", ".3f"),
    Column("MB", "local_mb", ".3f"),
    Column("iterations", "iterations"),
    Column("validation loss", "loss", ".4f"),
    Column("above DP", "above", "+.2%"),
    Column("of seeds", "spread"),
    Column("minutes", "minutes", ".1f"),
    Column("runs that reach its loss", "reached"),
    Column("after iterations", "after", ".0f"),
    Column("minutes", "goal_minutes", ".2f"),
    Column("x DP bf16", "times", ".1f"),
)


@dataclass(frozen=True)
class Pace:
    """Seconds of an iteration, and megabytes that a host sends in it, by the ledger."""

    seconds: float
    mb: float


def _read_paces(log: Path, run: IslandsRun) -> list[Pace]:
    """Read the pace of every iteration from the log of the first island, or of all hosts."""
    point, share = ("outer", 1) if run.case.has_islands else ("dp-grad", run.hosts)
    return [
        Pace(
            event.number("seconds_per_iteration"),
            event["comm"].get(point, {}).get("wire_bytes", 0.0) / share / 1e6,
        )
        for event in read_records(log)
        if event.get("kind") == "train"
    ]


def synchronous_pace(log: Path, run: IslandsRun) -> Pace:
    """Return the pace of equal iterations, without the first."""
    paces = _read_paces(log, run)[1:]
    return Pace(statistics.median(pace.seconds for pace in paces), statistics.fmean(pace.mb for pace in paces))


def local_pace(log: Path, run: IslandsRun) -> Pace:
    """Return the pace of local steps: means over a whole round, without the first step."""
    paces = _read_paces(log, run)[1 : run.case.every + 1]
    return Pace(statistics.fmean(pace.seconds for pace in paces), statistics.fmean(pace.mb for pace in paces))


class Runner:
    """Runner of cases on the hosts; finished runs are kept.

    Args:
        lab: the hosts.
        out: folder of text, logs and checkpoints.
        iterations: iterations of a run of data parallelism.
        longer: factor of the iterations of islands.
    """

    def __init__(self, lab: Lab, out: Path, iterations: int, longer: float) -> None:
        self.lab, self.out, self.iterations, self.longer = lab, out, iterations, longer
        tokens = int(IndexedDataset(out / "data" / "heldout_text_document").lengths.sum())
        self.hosts = len(lab.rates)
        self.eval_iters = max((tokens - 1) // SHAPE["seq-length"] // global_batch(self.hosts), 1)

    def whole_run(self, case: IslandsCase, seed: int) -> IslandsRun:
        """Train a case from the beginning to the end, on unshaped links."""
        iterations = round(self.iterations * self.longer) if case.has_islands else self.iterations
        log = self.out / "runs" / f"{runs.slug(case.name)}-{iterations}-{self.hosts}x-seed{seed}.jsonl"
        evaluation = {"eval-interval": max(iterations // EVALUATIONS, 1), "eval-iters": self.eval_iters}
        run = IslandsRun(case, iterations, log, self.out, evaluation, hosts=self.hosts, seed=seed)
        self._train_once(run, None)
        return run

    def paces(self, case: IslandsCase, links: Links | None) -> tuple[Pace | None, Pace | None]:
        """Measure the paces of a case in the warm-up (or of data parallelism) and local steps in a few iterations."""
        if not case.has_islands:
            return self._pace(case.spec, case, [case.spec], TIMED, links, synchronous_pace), None
        warmup: Pace | None = None
        if case.warmup:
            timed = EXACT_WARMUP if case.exact_warmup else replace(case, warmup=1.0)
            warmup = self._pace(f"{timed.spec} in step", timed, timed.specs(TIMED), TIMED, links, synchronous_pace)
        # A whole round, without the first step and the last step, which synchronizes everything.
        return warmup, self._pace(case.spec, case, [f"{case.spec},warmup=0"], case.every + 3, links, local_pace)

    def _pace(
        self,
        name: str,
        case: IslandsCase,
        specs: Sequence[str],
        iterations: int,
        links: Links | None,
        read: Callable[[Path, IslandsRun], Pace],
    ) -> Pace:
        links_text = "unshaped" if links is None else runs.slug(links.name)
        log = self.out / "timed" / f"{runs.slug(name)}-{self.hosts}x-{links_text}.jsonl"
        run = IslandsRun(case, iterations, log, self.out, {"eval-iters": 0}, tuple(specs), self.hosts)
        self._train_once(run, links)
        return read(run.logs()[0], run)

    def _train_once(self, run: IslandsRun, links: Links | None) -> None:
        done = run.log.with_suffix(".done")
        if done.exists():
            return
        for log in run.logs():
            log.unlink(missing_ok=True)
        run.log.parent.mkdir(parents=True, exist_ok=True)
        for host, rate in enumerate([None] * self.hosts if links is None else links.rates):
            self.lab.shape(host, rate)
        status = self.lab.run_each(run.commands(self.lab))
        if status:
            raise LabError(f"{run.log.stem}: the run ended with status {status}; its messages are above")
        done.touch()


@dataclass(frozen=True)
class IslandsRow:
    """A run of a case on links.

    Args:
        case, seed, links: names of the case and of the links, and the seed.
        log: its log, with the times of these links.
        warmup, local: seconds of an iteration of the warm-up (or of data parallelism) and of local steps.
        warmup_mb, local_mb: megabytes that a host sends in such an iteration, by the ledger.
        iterations, minutes: length of the whole run.
        loss: the last validation loss.
        goal: the baseline's last validation loss.
        after, goal_minutes: iterations and minutes to the goal; None when it was not reached.
        times: the baseline's minutes to the goal over these.
    """

    case: str
    seed: int
    links: str
    log: str
    warmup: float | None
    warmup_mb: float | None
    local: float | None
    local_mb: float | None
    iterations: int
    minutes: float
    loss: float
    goal: float | None = None
    after: int | None = None
    goal_minutes: float | None = None
    times: float | None = None

    @staticmethod
    def of(run: IslandsRun, links: Links, warmup: Pace | None, local: Pace | None) -> IslandsRow:
        """Return the row of a whole run, with its paces on some links."""
        log = _log_with_times(run, links, warmup, local)
        curves = read_run(f"run={log}", None)
        (warmup_s, warmup_mb), (local_s, local_mb) = (
            (None, None) if pace is None else (pace.seconds, pace.mb) for pace in (warmup, local)
        )
        return IslandsRow(
            run.case.name, run.seed, links.name, str(log), warmup_s, warmup_mb, local_s, local_mb, run.iterations,
            60 * curves.train[-1].hours, curves.valid[-1].loss,
        )  # fmt: skip

    def line(self) -> str:
        """Return a line of progress."""
        paces = ", then ".join(f"{seconds:.2f} s" for seconds in (self.warmup, self.local) if seconds is not None)
        return (
            f"{self.links}: {self.case}, seed {self.seed}: {paces} an iteration; {self.minutes:.1f} minutes, "
            f"validation loss {self.loss:.4f}"
        )


def _log_with_times(run: IslandsRun, links: Links, warmup: Pace | None, local: Pace | None) -> Path:
    """Copy a log with the times of links."""
    target = run.log.with_name(f"{run.log.stem}.at-{runs.slug(links.name)}.jsonl")
    warmup_iterations = run.case.warmup_iterations(run.iterations)
    lines = []
    for line in run.logs()[0].read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "train":
            pace = warmup if event["iteration"] <= warmup_iterations or local is None else local
            assert pace is not None
            event["seconds_per_iteration"] = pace.seconds
        lines.append(json.dumps(event))
    target.write_text("\n".join(lines) + "\n")
    return target


def add_goals(rows: Sequence[IslandsRow]) -> list[IslandsRow]:
    """Add the times to the last validation loss of the baseline on the same links with the same seed."""
    baselines = {(row.links, row.seed): row for row in rows if row.case == BASELINE.name}
    compared = []
    for row in rows:
        baseline = baselines[row.links, row.seed]
        point, base_point = (
            first_at_loss(read_run(f"run={log}", None).valid, baseline.loss) for log in (row.log, baseline.log)
        )
        row = replace(row, goal=baseline.loss)
        if point is not None and base_point is not None:
            times = base_point.hours / point.hours
            row = replace(row, after=point.iteration, goal_minutes=60 * point.hours, times=times)
        compared.append(row)
    return compared


def average_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a row for each case on the same links: means over its seeds, times over the seeds that reach the goal."""
    means = []
    for case in dict.fromkeys(row["case"] for row in rows):
        seeds = [row for row in rows if row["case"] == case]
        reached = [row for row in seeds if row["times"] is not None]
        above = [row["loss"] / row["goal"] - 1 for row in seeds]
        mean: dict[str, float | None] = {
            name: statistics.fmean(row[name] for row in seeds) for name in ("loss", "minutes")
        }
        for name in ("after", "goal_minutes", "times"):
            mean[name] = statistics.fmean(row[name] for row in reached) if reached else None
        spread = f"{min(above):+.2%} to {max(above):+.2%}" if len(seeds) > 1 else None
        counts = {"reached": f"{len(reached)} of {len(seeds)}", "above": statistics.fmean(above), "spread": spread}
        means.append({**seeds[0], **mean, **counts})
    return means


def write(rows: Sequence[IslandsRow], out: Path) -> str:
    """Write tables, curves of the first seed, and every figure to a folder; return the tables."""
    figures = [asdict(row) for row in rows]
    texts = []
    for links in dict.fromkeys(row.links for row in rows):
        group = [row for row in figures if row["links"] == links]
        goals = ", ".join(f"{goal:.4f}" for goal in dict.fromkeys(row["goal"] for row in group))
        cases = average_seeds(group)
        texts.append(f"### {links}; the loss is {goals}\n\n{TABLE.without_empty_columns(cases).text(cases)}")
        first_seed = [row for row in group if row["seed"] == group[0]["seed"]]
        words = [f"{row['case'].replace('=', ' ')}={row['log']}" for row in first_seed]
        picture = str(out / f"islands-{runs.slug(links)}.png")
        plot_loss_curves(
            [*words, "--baseline", BASELINE.name, "--x", "iterations,hours", "--smooth", "10", "-o", picture]
        )
    text = "\n\n".join(texts)
    (out / "table.md").write_text(text + "\n")
    write_record(out / "rows.json", header(device_name("cpu")), rows=figures)
    return text


def imitate_h100(runner: Runner, published: Sequence[Links]) -> list[Links]:
    """Make links that give this machine the ratio of communication to computation of H100s on published links."""
    pace, _ = runner.paces(BASELINE, None)
    assert pace is not None
    # The published gradients are of two hosts; in a ring of n each host sends 2 (n - 1) / n of the numbers.
    mb_of_two = pace.mb * runner.hosts / (2 * (runner.hosts - 1))
    imitated = []
    for links in published:
        setups = [islands_data(rate) for rate in links.rates]
        imitated.append(Links(tuple(int(8e6 * mb_of_two / (setup.ratio * pace.seconds)) for setup in setups)))
        slowest = islands_data(links.slowest)
        print(f"{slowest.name}: {slowest.arithmetic}; ratio {slowest.ratio:.3g}, here {imitated[-1].name}", flush=True)
    return imitated


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        LabError: for an invalid rate.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = join_for_help((case.name for case in CASES), ";")
    parser.add_argument("--cases", help=f"in addition to {BASELINE.name}, separated by semicolons: {names} (all)")
    parser.add_argument(
        "--rates",
        default="100mbit,10mbit",
        help="comma-separated links, each with one rate for all hosts or a rate per host, such as 100mbit/20mbit "
        "(100mbit,10mbit)",
    )
    parser.add_argument("--inside", default="10gbit", help="rate of loopback inside a host, or none (10gbit)")
    parser.add_argument("--seeds", type=int, default=1, help="whole runs of each case, with seeds from 1 on (1)")
    parser.add_argument(
        "--alike",
        action="store_true",
        help="imitate H100s with links of these rates: here links take as long relative to computing (setups.py)",
    )
    parser.add_argument("--iterations", type=int, default=240, help="iterations of data parallelism (240)")
    parser.add_argument("--longer", type=float, default=1.25, help="factor by which islands train longer (1.25)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/islands"), help="folder of all results")
    options = parser.parse_args(words)
    case_names = parse_names(parser, "--cases", options.cases, [case.name for case in CASES], ";")
    options.cases = [case for case in CASES if case.name in (BASELINE.name, *case_names)]
    for case in options.cases:
        iterations = round(options.iterations * options.longer)
        if case.has_islands and iterations - case.warmup_iterations(iterations) < case.every:
            parser.error(f"--iterations {options.iterations}: too few for a round of {case.every} of {case.name}")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: give at least 1")
    options.inside = parse_rate(options.inside)
    options.links = _parse_links(parser, options.rates)
    return options


def _parse_links(parser: argparse.ArgumentParser, text: str) -> list[Links]:
    """Parse --rates, whose links are all of the same number of hosts."""
    rates_by_word = [[parse_rate(rate) for rate in word.split("/")] for word in text.split(",")]
    counts = {len(rates) for rates in rates_by_word if len(rates) > 1} or {HOSTS}
    if len(counts) > 1:
        hosts_text = " and of ".join(map(str, sorted(counts)))
        parser.error(f"--rates {text}: rates of {hosts_text} hosts; give the same number in each")
    (hosts,) = counts
    links = []
    for rates in rates_by_word:
        shaped = tuple(rate for rate in rates if rate is not None)
        if len(shaped) < len(rates):
            parser.error("--rates none: give the rates of slow links")
        links.append(Links(shaped if len(shaped) > 1 else shaped * hosts))
    return links


def run() -> int:
    options = parse()
    out = options.out.resolve()
    runs.prepare(out, TRAIN_BYTES, HELDOUT_BYTES)
    hosts = len(options.links[0].rates)
    rows: list[IslandsRow] = []
    with Lab([None] * hosts, (os.cpu_count() or 1) / hosts, inside=options.inside) as lab:
        runner = Runner(lab, out, options.iterations, options.longer)
        for links in imitate_h100(runner, options.links) if options.alike else options.links:
            for case in options.cases:
                for seed in range(1, options.seeds + 1):
                    rows.append(IslandsRow.of(runner.whole_run(case, seed), links, *runner.paces(case, links)))
                    print(rows[-1].line(), flush=True)
    print(write(add_goals(rows), out))
    return 0


if __name__ == "__main__":
    sys.exit(run_with_hosts("bench-islands", run))
