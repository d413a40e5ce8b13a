"""Trains over a slow link between two hosts: data parallelism, islands and torch's DDP hooks, to the same loss.

    sudo make bench-islands                                                       about half an hour
    sudo make bench-islands ARGS="--alike --rates 100mbit"                        a link as slow for it as an H100's
    sudo make bench-islands ARGS="--rates 100mbit --cases 'DP, PowerSGD of rank 16'"

Each host (a network namespace with half of the processors) holds a pipeline of two stages, whose messages stay inside.
Gradients, or what islands exchange, cross the link between the hosts, which has the rates of --rates. A whole run of
each case gives its losses. On the first link it is measured as it is where the case is one of --whole; all other times
are computed: seconds of an iteration, which a few iterations on that link give, times iterations. Losses do not depend
on links. Writes logs, a plot for each link, a table and every figure to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import chosen, listed, runs
from benchmarks.lab.command import describe, parse_rate
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
    bench_of,
)
from benchmarks.network.islands_plan import measured_hosts, predicted
from benchmarks.network.islands_report import IslandsRow, Pace, compared, dp_pace, local_pace, phases, write
from benchmarks.network.run import START_SECONDS, STEP_SECONDS, shape, steps_taken, workers
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
        self.evaluation = max((tokens - 1) // SHAPE["seq-length"] // SHAPE["global-batch-size"], 1)

    def length(self, case: IslandsCase) -> int:
        """Iterations of a whole run."""
        return round(self.iterations * self.longer) if case.has_islands else self.iterations

    def whole(self, case: IslandsCase, rate: int | None) -> tuple[Path, dict[str, float]]:
        """Trains a case from the beginning to the end.

        Returns:
            Its log, and the bytes that the first host has sent by its interface and by the ledger.
        """
        run = self.run(case, rate)

        def train() -> dict[str, float]:
            counted = self._train(run, rate)
            if case.has_islands:
                run.log.write_text(run.logs()[0].read_text())
            return counted

        return run.log, self._kept(run.log, train)

    def run(self, case: IslandsCase, rate: int | None) -> IslandsRun:
        """The whole run of a case."""
        iterations = self.length(case)
        log = self.out / "runs" / f"{runs.slug(case.name)}-{iterations}-{describe(rate)}.jsonl"
        evaluated = {"eval-interval": max(iterations // EVALUATIONS, 1), "eval-iters": self.evaluation}
        return IslandsRun(case, iterations, log, self.out, evaluated)

    def paces(self, case: IslandsCase, rate: int | None) -> tuple[Pace | None, Pace | None]:
        """The paces of a case before its first local step and from there on, from a few iterations of each."""
        if not case.has_islands:
            return self._pace(case.spec, case, [case.spec], TIMED, rate, dp_pace), None
        first: Pace | None = None
        if case.in_step:
            timed = IN_STEP if case.sums_exactly else replace(case, in_step=1.0)
            first = self._pace(f"{timed.spec} in step", timed, timed.specs(TIMED), TIMED, rate, dp_pace)
        # A whole round, without the first step and the last one, which brings everything together.
        local = self._pace(
            case.spec, case, [f"{case.spec},warmup=0"], case.every + 3, rate, partial(local_pace, every=case.every)
        )
        return first, local

    def _pace(
        self,
        name: str,
        case: IslandsCase,
        specs: Sequence[str],
        iterations: int,
        rate: int | None,
        read: Callable[[Path, bool], Pace],
    ) -> Pace:
        log = self.out / "timed" / f"{runs.slug(name)}-{describe(rate)}.jsonl"
        run = IslandsRun(case, iterations, log, self.out, {"eval-iters": 0}, tuple(specs))
        self._kept(log, lambda: self._train(run, rate))
        return read(run.logs()[0], case.has_islands)

    def _kept(self, log: Path, train: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What a training counted, which is done unless it has been."""
        done = log.with_suffix(".counted")
        if not done.exists():
            log.parent.mkdir(parents=True, exist_ok=True)
            done.write_text(json.dumps(train()))
        found: dict[str, float] = json.loads(done.read_text())
        return found

    def _train(self, run: IslandsRun, rate: int | None) -> dict[str, float]:
        for log in run.logs():
            log.unlink(missing_ok=True)
        run.log.parent.mkdir(parents=True, exist_ok=True)
        shape(self.lab, rate)
        before = self.lab.traffic()[0].sent
        status = self.lab.run_each(run.commands(self.lab))
        if status:
            raise LabError(f"{run.log.stem}: the run ended with status {status}; its messages are above")
        by_ledger = sum(sent for _, sent in phases(run.logs()[0], run.case.has_islands))
        return {"counter": self.lab.traffic()[0].sent - before, "ledger": by_ledger}


def measure(
    runner: Runner, cases: Sequence[IslandsCase], rates: Sequence[int], measured: Sequence[str]
) -> list[IslandsRow]:
    """Measures the cases on each link; returns them in order, link by link.

    Raises:
        LabError: when a run fails.
    """
    found: list[IslandsRow] = []
    for rate in rates:
        for case in cases:
            here = rate == rates[0] and case.name in measured
            at = rates[0] if case.name in measured else None
            log, counted = runner.whole(case, at)
            paces = None if here else runner.paces(case, rate)
            one = IslandsRow.of(case, runner.length(case), rate, log, counted, paces)
            print(one.line(), flush=True)
            found.append(one)
    return compared(found, BASELINE.name)


def planned(runner: Runner, found: Sequence[IslandsRow], cases: Sequence[IslandsCase]) -> list[IslandsRow]:
    """The rows with what the planner says of their iterations.

    Raises:
        LabError: when the hosts cannot be measured.
    """
    own = {case.name: runner.run(case, None) for case in cases}
    specs = {spec for run in own.values() if run.case.has_islands for spec in run.case.specs(run.iterations)}
    cluster = measured_hosts(sorted(specs), runner.out)
    said = [predicted(own[row.case], cluster, row.rate) for row in found]
    return [
        replace(row, planned_in_step=in_step, planned_local=local)
        for row, (in_step, local) in zip(found, said, strict=True)
    ]


def rates_of(runner: Runner, rates: Sequence[int], alike: bool) -> list[int]:
    """Rates of the links here.

    Args:
        runner: runs what tells how long an iteration computes.
        rates: bits per second.
        alike: whether those are rates of a published system's links, whose ratio the ones here get.
    """
    if not alike:
        return list(rates)
    pace, _ = runner.paces(BASELINE, None)
    assert pace is not None
    found = []
    for rate in rates:
        setup = islands_data(rate)
        found.append(int(8e6 * pace.mb / (setup.ratio * pace.seconds)))
        print(f"{setup.name}: {setup.arithmetic}; ratio {setup.ratio:.3g}, here {describe(found[-1])}", flush=True)
    return found


def measure_peers(rates: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Seconds of a step of torch's DDP with its hooks, for a model of the same shape without pipeline stages.

    Raises:
        LabError: when the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    with workers(bench_of(1, PEERS)) as (lab, ranks):
        for case in PEERS:
            shape(lab, None)
            ranks.ask(START_SECONDS, do="build", case=asdict(case), steps=3)
            for rate in rates:
                shape(lab, rate)
                taken, sent_mb = steps_taken(lab, ranks, steps, STEP_SECONDS)
                seconds = min(step["seconds"] for step in taken)
                rows.append({"case": case.name, "rate": rate, "seconds": seconds, "counted_mb": sent_mb})
                print(f"{describe(rate)}: {case.name}: {seconds:.2f} s a step", flush=True)
    return rows


def parse() -> argparse.Namespace:
    """Parses the command line.

    Raises:
        LabError: for a rate that is none.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = listed((case.name for case in CASES), ";")
    parser.add_argument("--cases", help=f"beside {BASELINE.name}, separated by semicolons: {names} (all)")
    parser.add_argument("--rates", default="100mbit,10mbit", help="of the link, comma-separated (100mbit,10mbit)")
    parser.add_argument(
        "--alike",
        action="store_true",
        help="the rates are those of an H100's link: here links take as long, relative to computing (setups.py)",
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
    options.rates = [parse_rate(word) for word in options.rates.split(",")]
    if None in options.rates:
        parser.error("--rates none: give the rates of slow links")
    return options


def run() -> int:
    options = parse()
    out = options.out.resolve()
    runs.prepare(out, TRAIN_BYTES, HELDOUT_BYTES)
    with Lab([None] * HOSTS, (os.cpu_count() or 1) / HOSTS) as lab:
        runner = Runner(lab, out, options.iterations, options.longer)
        rates = rates_of(runner, options.rates, options.alike)
        found = measure(runner, options.cases, rates, options.whole)
    found = planned(runner, found, options.cases)
    peers = [] if options.no_peers else measure_peers(rates, 2)
    print(write(found, peers, out, BASELINE.name))
    return 0


if __name__ == "__main__":
    sys.exit(run_with_hosts("bench-islands", run))
