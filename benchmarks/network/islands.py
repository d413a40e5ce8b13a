"""Trains over slow links between hosts: data parallelism, islands and torch's DDP hooks, to the same loss.

    sudo make bench-islands                                                       about half an hour
    sudo make bench-islands ARGS="--alike --rates 100mbit"                        a link as slow for it as an H100's
    sudo make bench-islands ARGS="--rates 100mbit --cases 'DP, PowerSGD of rank 16'"
    sudo make bench-islands ARGS="--rates 100mbit/100mbit/20mbit"                 three hosts, one on a slower link

Each host (a network namespace with its share of the processors) holds a pipeline of two stages, whose messages stay
inside. Gradients, or what islands exchange, cross the links between the hosts, which have the rates of --rates. Whole
runs of each case, one for each seed, give its losses. On the first links the first is measured as it is where the case
is one of --whole; all other times are computed: seconds of an iteration, which a few iterations on those links give,
times iterations. Losses do not depend on links. Writes logs, a plot for each link, a table and every figure to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import chosen, listed, runs
from benchmarks.lab.command import parse_rate
from benchmarks.lab.hosts import Lab, LabError, run_with_hosts
from benchmarks.network.cases import NetworkCase
from benchmarks.network.islands_cases import (
    BASELINE,
    CASES,
    HOSTS,
    IN_STEP,
    QUICKEST,
    SHAPE,
    IslandsCase,
    IslandsRun,
    Links,
    bench_of,
    global_batch,
    name_of,
)
from benchmarks.network.islands_report import IslandsRow, Pace, compared, dp_pace, local_pace, phases, write
from benchmarks.network.run import START_SECONDS, STEP_SECONDS, steps_taken, workers
from benchmarks.network.setups import islands_data
from megatron.data.indexed import IndexedDataset

TRAIN_BYTES, HELDOUT_BYTES = 1_200_000, 24_000
"""Each evaluation takes the whole held-out text, so that losses at two iterations are of the same samples."""
EVALUATIONS = 10
TIMED = 4
PEERS = (
    NetworkCase("torch DDP, fp16 hook", peer="ddp-fp16"),
    NetworkCase("torch DDP, powerSGD_hook, rank 16", peer="ddp-powersgd", rank=16),
)


class Runner:
    """Runs cases on the hosts. What was run before is kept.

    Args:
        lab: the hosts.
        out: folder of text, logs and checkpoints.
        iterations: iterations of a run of data parallelism.
        longer: islands take so many times as many.
    """

    def __init__(self, lab: Lab, out: Path, iterations: int, longer: float) -> None:
        self.lab, self.out, self.iterations, self.longer = lab, out, iterations, longer
        tokens = int(IndexedDataset(out / "data" / "heldout_text_document").lengths.sum())
        self.hosts = len(lab.rates)
        self.evaluation = max((tokens - 1) // SHAPE["seq-length"] // global_batch(self.hosts), 1)

    def length(self, case: IslandsCase) -> int:
        """Iterations of a whole run."""
        return round(self.iterations * self.longer) if case.has_islands else self.iterations

    def whole(self, run: IslandsRun, links: Links | None) -> dict[str, float]:
        """Trains a case from the beginning to the end.

        Returns:
            The bytes that the first host has sent by its interface and by the ledger.
        """

        def train() -> dict[str, float]:
            counted = self._train(run, links)
            if run.case.has_islands:
                run.log.write_text(run.logs()[0].read_text())
            return counted

        return self._kept(run.log, train)

    def run(self, case: IslandsCase, seed: int, links: Links | None) -> IslandsRun:
        """The whole run of a case."""
        iterations = self.length(case)
        name = f"{runs.slug(case.name)}-{iterations}-{self.hosts}x-seed{seed}-{runs.slug(name_of(links))}"
        evaluated = {"eval-interval": max(iterations // EVALUATIONS, 1), "eval-iters": self.evaluation}
        log = self.out / "runs" / f"{name}.jsonl"
        return IslandsRun(case, iterations, log, self.out, evaluated, hosts=self.hosts, seed=seed)

    def paces(self, case: IslandsCase, links: Links | None) -> tuple[Pace | None, Pace | None]:
        """The paces of a case before its first local step and from there on, from a few iterations of each."""
        if not case.has_islands:
            return self._pace(case.spec, case, [case.spec], TIMED, links, dp_pace), None
        first: Pace | None = None
        if case.in_step:
            timed = IN_STEP if case.sums_exactly else replace(case, in_step=1.0)
            first = self._pace(f"{timed.spec} in step", timed, timed.specs(TIMED), TIMED, links, dp_pace)
        # A whole round, without the first step and the last one, which brings everything together.
        local = self._pace(case.spec, case, [f"{case.spec},warmup=0"], case.every + 3, links, local_pace)
        return first, local

    def _pace(
        self,
        name: str,
        case: IslandsCase,
        specs: Sequence[str],
        iterations: int,
        links: Links | None,
        read: Callable[[Path, IslandsRun], Pace],
    ) -> Pace:
        log = self.out / "timed" / f"{runs.slug(name)}-{self.hosts}x-{runs.slug(name_of(links))}.jsonl"
        run = IslandsRun(case, iterations, log, self.out, {"eval-iters": 0}, tuple(specs), self.hosts)
        self._kept(log, lambda: self._train(run, links))
        return read(run.logs()[0], run)

    def _kept(self, log: Path, train: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What a training counted, which is done unless it has been."""
        done = log.with_suffix(".counted")
        if not done.exists():
            log.parent.mkdir(parents=True, exist_ok=True)
            done.write_text(json.dumps(train()))
        found: dict[str, float] = json.loads(done.read_text())
        return found

    def _train(self, run: IslandsRun, links: Links | None) -> dict[str, float]:
        for log in run.logs():
            log.unlink(missing_ok=True)
        run.log.parent.mkdir(parents=True, exist_ok=True)
        give(self.lab, links)
        before = self.lab.traffic()[0].sent
        status = self.lab.run_each(run.commands(self.lab))
        if status:
            raise LabError(f"{run.log.stem}: the run ended with status {status}; its messages are above")
        by_ledger = sum(sent for _, sent in phases(run.logs()[0], run))
        return {"counter": self.lab.traffic()[0].sent - before, "ledger": by_ledger}


def give(lab: Lab, links: Links | None) -> None:
    """Gives the hosts their links; None: not shaped."""
    for host, rate in enumerate([None] * len(lab.rates) if links is None else links.rates):
        lab.shape(host, rate)


def measure(
    runner: Runner, cases: Sequence[IslandsCase], every: Sequence[Links], measured: Sequence[str], seeds: int
) -> list[IslandsRow]:
    """Measures the cases on all links, with seeds from 1 on; returns the runs in order, links by links.

    Raises:
        LabError: when a run fails.
    """
    found: list[IslandsRow] = []
    for links in every:
        for case in cases:
            for seed in range(1, seeds + 1):
                at = every[0] if case.name in measured and seed == 1 else None
                run = runner.run(case, seed, at)
                counted = runner.whole(run, at)
                one = IslandsRow.of(run, links, counted, None if links == at else runner.paces(case, links))
                print(one.line(), flush=True)
                found.append(one)
    return compared(found, BASELINE.name)


def links_of(runner: Runner, wanted: Sequence[Links], alike: bool) -> list[Links]:
    """The links here.

    Args:
        runner: runs what tells how long an iteration computes.
        wanted: links.
        alike: whether those are a published system's links, whose ratio the ones here get.
    """
    if not alike:
        return list(wanted)
    pace, _ = runner.paces(BASELINE, None)
    assert pace is not None
    # Of two in a ring-all-reduce: what each host sends here is twice (n - 1) / n of the numbers.
    sent_by_two = pace.mb * runner.hosts / (2 * (runner.hosts - 1))
    found = []
    for links in wanted:
        setups = [islands_data(rate) for rate in links.rates]
        found.append(Links(tuple(int(8e6 * sent_by_two / (setup.ratio * pace.seconds)) for setup in setups)))
        slowest = islands_data(links.slowest)
        print(f"{slowest.name}: {slowest.arithmetic}; ratio {slowest.ratio:.3g}, here {found[-1].name}", flush=True)
    return found


def measure_peers(hosts: int, every: Sequence[Links], steps: int) -> list[dict[str, Any]]:
    """Seconds of a step of torch's DDP with its hooks, for a model of the same shape without pipeline stages.

    Raises:
        LabError: when the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    with workers(bench_of(hosts, 1, PEERS)) as (lab, ranks):
        for case in PEERS:
            give(lab, None)
            ranks.ask(START_SECONDS, do="build", case=asdict(case), steps=3)
            for links in every:
                give(lab, links)
                taken, sent_mb = steps_taken(lab, ranks, steps, STEP_SECONDS)
                seconds = min(step["seconds"] for step in taken)
                rows.append({"case": case.name, "links": links.name, "seconds": seconds, "counted_mb": sent_mb})
                print(f"{links.name}: {case.name}: {seconds:.2f} s a step", flush=True)
    return rows


def parse() -> argparse.Namespace:
    """Parses the command line.

    Raises:
        LabError: for a rate that is none.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = listed((case.name for case in CASES), ";")
    parser.add_argument("--cases", help=f"beside {BASELINE.name}, separated by semicolons: {names} (all)")
    parser.add_argument(
        "--rates",
        default="100mbit,10mbit",
        help="of the hosts' links, comma-separated; one for all, or each host's, as 100mbit/20mbit (100mbit,10mbit)",
    )
    parser.add_argument("--inside", default="10gbit", help="rate of what a host sends to itself, or none (10gbit)")
    parser.add_argument("--seeds", type=int, default=1, help="whole runs of each case, with seeds from 1 on (1)")
    parser.add_argument(
        "--alike",
        action="store_true",
        help="the rates are those of H100s' links: here links take as long, relative to computing (setups.py)",
    )
    parser.add_argument("--iterations", type=int, default=240, help="of data parallelism (240)")
    parser.add_argument("--longer", type=float, default=1.25, help="islands take so many times as many (1.25)")
    parser.add_argument(
        "--whole",
        default=QUICKEST.name,
        help=f"cases measured as they are on the first link, separated by semicolons ({listed([QUICKEST.name])})",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave torch's DDP out")
    parser.add_argument("--out", type=Path, default=Path("bench_out/islands"), help="folder of all that is written")
    options = parser.parse_args()
    known: Mapping[str, IslandsCase] = {case.name: case for case in CASES}
    wanted = chosen(parser, "--cases", options.cases, known, ";")
    options.cases = [case for name, case in known.items() if name in (BASELINE.name, *wanted)]
    options.whole = chosen(parser, "--whole", options.whole, known, ";")
    for case in options.cases:
        iterations = round(options.iterations * options.longer)
        if case.has_islands and iterations - case.steps_in_step(iterations) < case.every:
            parser.error(f"--iterations {options.iterations}: too few for a round of {case.every} of {case.name}")
    options.inside = parse_rate(options.inside)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1")
    options.links = _links(parser, options.rates)
    return options


def _links(parser: argparse.ArgumentParser, words: str) -> list[Links]:
    """Parses --rates. All links are of as many hosts."""
    given = [[parse_rate(rate) for rate in word.split("/")] for word in words.split(",")]
    counts = {len(rates) for rates in given if len(rates) > 1} or {HOSTS}
    if len(counts) > 1:
        parser.error(
            f"--rates {words}: rates of {' and of '.join(map(str, sorted(counts)))} hosts; give as many in each"
        )
    (hosts,) = counts
    found = []
    for rates in given:
        known = tuple(rate for rate in rates if rate is not None)
        if len(known) < len(rates):
            parser.error("--rates none: give the rates of slow links")
        found.append(Links(known if len(known) > 1 else known * hosts))
    return found


def run() -> int:
    options = parse()
    out = options.out.resolve()
    runs.prepare(out, TRAIN_BYTES, HELDOUT_BYTES)
    hosts = len(options.links[0].rates)
    with Lab([None] * hosts, (os.cpu_count() or 1) / hosts, inside=options.inside) as lab:
        runner = Runner(lab, out, options.iterations, options.longer)
        every = links_of(runner, options.links, options.alike)
        found = measure(runner, options.cases, every, options.whole, options.seeds)
    peers = [] if options.no_peers else measure_peers(hosts, every, 2)
    print(write(found, peers, out, BASELINE.name))
    return 0


if __name__ == "__main__":
    sys.exit(run_with_hosts("bench-islands", run))
