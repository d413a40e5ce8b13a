"""Trains the same model on hosts with shaped links, uncompressed, compressed, and beside torch's own DDP hooks.

    sudo make bench-network                              every layout, about an hour
    sudo make bench-network ARGS="--layouts pp4 --quick" one layout, its extreme links
    sudo make bench-network ARGS="--device cuda"         ranks on this machine's GPU, over NCCL

Each host is a network namespace. On CPUs it has a processor share of its own, and a link's rate is not the published
one: it is such that the uncompressed fp32 traffic takes as long, relative to the computing time measured here, as in
the published set-up (setups.py holds the arithmetic). On a GPU models are larger and links have the rates that they
are named by; what is not waiting or coding there counts as computing. Prints Markdown; writes it with a plot and every
measurement to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import chosen
from benchmarks.lab.hosts import Lab, LabError, run_with_hosts
from benchmarks.network.cases import BENCHES, FP32, Bench, NetworkCase, plan_of
from benchmarks.network.cuda_cases import CUDA_BENCHES
from benchmarks.network.report import figure, rate_of, table
from benchmarks.network.setups import Setup
from benchmarks.network.worker import config_of
from benchmarks.record import device_name, header, write_record
from megatron.planner.choice import choice_of
from megatron.planner.cluster import Cluster, write_cluster
from megatron.planner.measure import described
from megatron.planner.predict import Predictor

WARM_STEPS = 3
"""On fast links: first visits of samples, first choices of coordinates, exact steps before a peer's hook."""
PAYLOAD = 1448 / 1514
"""TCP's share of a full Ethernet frame."""
START_SECONDS = 300.0
STEP_SECONDS = 900.0


@dataclass(frozen=True)
class Measurement:
    """The measurement of a case on a link.

    Args:
        layout, setup, rate: the link; its rate in bits per second, None unshaped.
        case: name of the case.
        seconds: time of an iteration on the slowest rank, the median.
        tokens_per_s: tokens per second of the whole run.
        compute_s, coded_s, waited_s: seconds of an iteration, means over the ranks.
        host_mb: MB that a host sends in an iteration, by its interface's counter; the host that sent most.
        loss: loss of the last step.
        predicted_s: the planner's time of an iteration; None for a case that it does not know.
        waited: time of waiting by point, where it is known.
        formula_mb: MB in frames that a host sends in an iteration by the formula of two-level sums; None for others.
    """

    layout: str
    setup: str
    rate: float | None
    case: str
    seconds: float
    tokens_per_s: float
    compute_s: float
    coded_s: float
    waited_s: float
    host_mb: float
    loss: float
    predicted_s: float | None
    waited: dict[str, float] = field(default_factory=dict)
    formula_mb: float | None = None


class Workers:
    """The ranks on the hosts, which read commands from a folder."""

    def __init__(self, lab: Lab, bench: Bench, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self._number = 0
        self._status: int | None = None
        (folder / "plan.json").write_text(json.dumps(plan_of(bench)))
        command = ["-m", "benchmarks.network.worker", str(folder)]
        self._thread = threading.Thread(target=self._run, args=(command, bench.ranks_per_host), daemon=True)
        self._thread.start()

    def _run(self, command: Sequence[str], ranks_per_host: int) -> None:
        self._status = self.lab.run(command, ranks_per_host)

    def ask(self, timeout: float, **command: Any) -> list[dict[str, float]]:
        """Gives a command to all ranks and waits for the first one's answer.

        Raises:
            LabError: when the ranks are gone, or too slow.
        """
        partial = self.folder / "command.partial"
        partial.write_text(json.dumps(command))
        os.replace(partial, self.folder / f"command{self._number}.json")
        answer, deadline = self.folder / f"result{self._number}.json", time.monotonic() + timeout
        self._number += 1
        while not answer.exists():
            if self._status is not None:
                raise LabError(f"the ranks ended with status {self._status}; their messages are above")
            if time.monotonic() > deadline:
                raise LabError(f"no answer within {timeout:g} s to {command}")
            time.sleep(0.02)
        found: list[dict[str, float]] = json.loads(answer.read_text())
        return found

    def stop(self) -> None:
        """Ends the ranks."""
        if self._status is None:
            (self.folder / f"command{self._number}.json").write_text('{"do": "stop"}')
            self._thread.join(60)


@contextmanager
def workers(bench: Bench) -> Iterator[tuple[Lab, Workers]]:
    """Starts hosts with equal shares of the processors, and ranks on them."""
    # A GPU's ranks need their processors to launch what it computes.
    share = (os.cpu_count() or 1) / bench.hosts if bench.device == "cpu" else None
    lab = Lab([None] * bench.hosts, share, bench.device)
    with tempfile.TemporaryDirectory(prefix="bench-network-") as folder, lab:
        started = Workers(lab, bench, Path(folder))
        yield lab, started
        started.stop()  # else the laboratory ends them


def link_rate(bench: Bench, setup: Setup, computed: dict[str, float]) -> float:
    """The rate in bits per second at which uncompressed traffic takes ``ratio`` times as long as computing.

    Args:
        computed: figures of an uncompressed step on unshaped links.
    """
    if setup.rate is not None:
        return setup.rate
    _, hidden, sequence = bench.model
    if bench.paced_by == "message":
        piece = computed["slowest_compute_s"] / bench.micro_batches
        # Tensor-parallel ranks of one host each send the whole activation over its link.
        sharing = min(bench.tp, bench.ranks_per_host)
        return sharing * sequence * hidden * 32 / (setup.ratio * piece)
    if bench.paced_by == "experts":
        return bench.sent_to_experts * 8 / (setup.ratio * computed["slowest_compute_s"] / bench.micro_batches)
    return 2 * (bench.dp - 1) / bench.dp * bench.parameters * 32 / (setup.ratio * computed["slowest_compute_s"])


def linked(cluster: Cluster, rate: float | None) -> Cluster:
    """The cluster of hosts with shaped links, whose rate counts the frames around the payload."""
    if rate is None:
        return cluster
    carried = min(cluster.across.gbit_per_s, rate / 1e9 * PAYLOAD)
    return replace(cluster, across=replace(cluster.across, gbit_per_s=carried))


def predicted(bench: Bench, case: NetworkCase, cluster: Cluster | None) -> float | None:
    """Seconds of an iteration, as the planner predicts them."""
    if case.peer or cluster is None:
        return None
    config = config_of(plan_of(bench), list(case.specs), cluster.gpus, case.schedule)
    return Predictor(config, cluster, bench.vocab).predict(choice_of(config, cluster.gpus)).seconds


def described_hosts(name: str, bench: Bench, ranks: Workers, out: Path) -> Cluster:
    """The hosts as the planner's cluster; also written to the folder ``out``."""
    specs = sorted({spec for case in bench.cases for spec in case.specs})
    (rates,) = ranks.ask(STEP_SECONDS, do="measure", specs=specs, ranks_per_host=bench.ranks_per_host)
    cluster = described(rates, Cluster(name, bench.hosts * bench.ranks_per_host, bench.ranks_per_host))
    (out / f"cluster-{name}.yaml").write_text(write_cluster(cluster))
    return cluster


def steps_taken(lab: Lab, ranks: Workers, steps: int, long_seconds: float) -> tuple[list[dict[str, float]], float]:
    """The times of some steps, or of one that takes long, and the megabytes of a step that the busiest host sends."""
    before = lab.traffic()
    answer = ranks.ask(STEP_SECONDS, do="steps", steps=1)
    if steps > 1 and answer[0]["seconds"] < long_seconds:
        answer += ranks.ask(STEP_SECONDS, do="steps", steps=steps - 1)
    sent = [now - then for now, then in zip(lab.traffic(), before, strict=True)]
    return answer, max(traffic.sent for traffic in sent) / 1e6 / len(answer)


Wanted = Callable[[str, str], bool]
"""Whether a case (the second word) is to be measured on a link (the first one), which begins then."""


def measure(
    name: str,
    bench: Bench,
    setups: Sequence[Setup],
    steps: int,
    out: Path,
    *,
    unshaped: bool = True,
    wanted: Wanted = lambda setup, case: True,
    long_seconds: float = math.inf,
) -> Generator[Measurement, None, None]:
    """Measures every case on every link of a layout; yields each when it is measured.

    Args:
        name, bench: name of the layout, and the benchmark.
        setups: set-ups of its links.
        steps: steps per measurement.
        out: folder of the planner's cluster.
        unshaped: whether to measure on unshaped links as well.
        wanted: a filter of the cases.
        long_seconds: time of a step above which it is not repeated.
    """
    tokens = bench.micro_batch * bench.micro_batches * bench.dp * bench.model[2]
    with workers(bench) as (lab, ranks):
        reference = ranks.ask(START_SECONDS, do="build", case=asdict(FP32), steps=3)
        computed = {key: statistics.median(step[key] for step in reference[1:]) for key in reference[0]}
        print(
            f"{name}: an iteration computes for {computed['slowest_compute_s']:.2f} s on the slowest rank, "
            f"and takes {computed['seconds']:.2f} s on unshaped links",
            flush=True,
        )
        # On a shared GPU what a rank computes with depends on the others; and experts are not planned.
        planned = bench.device == "cpu" and not bench.experts
        cluster = described_hosts(name, bench, ranks, out) if planned else None
        links = ({"unshaped": None} if unshaped else {}) | _rates(bench, setups, computed)
        for case in bench.cases:
            built = False
            for setup_name, rate in links.items():
                if not wanted(setup_name, case.name):
                    continue
                if not built:
                    shape(lab, None)
                    ranks.ask(STEP_SECONDS, do="build", case=asdict(case), steps=WARM_STEPS)
                    built = True
                shape(lab, rate)
                answer, sent_mb = steps_taken(lab, ranks, steps, long_seconds)
                expected = predicted(bench, case, cluster and linked(cluster, rate))
                median = {key: statistics.median(step[key] for step in answer) for key in answer[0]}
                found = Measurement(
                    name, setup_name, rate, case.name, median["seconds"], tokens / median["seconds"],
                    median["compute_s"], median["coded_s"], median["waited_s"],
                    sent_mb, answer[-1]["loss"], expected,
                    {key.removeprefix("waited "): s for key, s in median.items() if key.startswith("waited ") and s},
                    None if case.levels is None else bench.sent_in_two_levels(case.levels[1]) / PAYLOAD / 1e6,
                )  # fmt: skip
                foreseen = "" if expected is None else f" (predicted {expected:.2f})"
                print(f"  {setup_name}: {case.name}: {found.seconds:.2f} s{foreseen}{_compared(found)}", flush=True)
                yield found


def _compared(found: Measurement) -> str:
    """The bytes of a host beside those of the formula."""
    if found.formula_mb is None:
        return ""
    off = found.host_mb / found.formula_mb - 1
    return f", a host sends {found.host_mb:.2f} MB: {off:+.1%} of the formula's {found.formula_mb:.2f} MB"


def _rates(bench: Bench, setups: Sequence[Setup], computed: dict[str, float]) -> dict[str, float | None]:
    """Rates of links by the names of their set-ups, which are printed."""
    rates: dict[str, float | None] = {}
    for setup in setups:
        rates[setup.name] = rate = link_rate(bench, setup, computed)
        print(f"  {setup.name}: {setup.arithmetic}; ratio {setup.ratio:.3f}, here {rate_of(rate)}", flush=True)
    return rates


def shape(lab: Lab, rate: float | None) -> None:
    """Gives all links a rate."""
    for host in range(len(lab.rates)):
        lab.shape(host, None if rate is None else int(rate))


def with_cases(bench: Bench, words: str | None) -> Bench:
    """A layout with only the cases whose names contain one of some words."""
    if words is None:
        return bench
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()]
    return replace(bench, cases=tuple(c for c in bench.cases if any(word in c.name.lower() for word in wanted)))


def write(found: Sequence[Measurement], out: Path, device: str) -> None:
    """Writes all measurements, as tables and a plot."""
    rows = [asdict(row) for row in found]
    write_record(out / "rows.json", header(device_name(device)), rows=rows)
    (out / "table.md").write_text(table(rows) + "\n")
    figure(rows, out / "network.png")


def parse() -> argparse.Namespace:
    """Parses the command line; the chosen layouts are in ``benches``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts",
        help=f"comma-separated, of {', '.join(BENCHES)}; with --device cuda of {', '.join(CUDA_BENCHES)} (all)",
    )
    parser.add_argument(
        "--cases", metavar="WORDS", help="comma-separated: only the cases with one of these words in their names"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (cpu)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each case on each link (2)")
    parser.add_argument("--quick", action="store_true", help="the first and the last link of each layout only")
    parser.add_argument(
        "--out", help="folder of tables, plots and measurements (bench_out/network, or network-cuda with --device cuda)"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; leave it out to train over gloo")
    layouts = CUDA_BENCHES if cuda else BENCHES
    names = chosen(parser, "--layouts", options.layouts, layouts)
    options.benches = {name: with_cases(layouts[name], options.cases) for name in names}
    for name, bench in options.benches.items():
        if not bench.cases:
            known = "; ".join(case.name for case in layouts[name].cases)
            parser.error(f"--cases {options.cases}: {name} has none of such a name; it has {known}")
    options.out = Path(options.out or ("bench_out/network-cuda" if cuda else "bench_out/network"))
    return options


def measure_layouts(options: argparse.Namespace) -> int:
    """Measures the chosen layouts, and writes what is measured after each."""
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    found: list[Measurement] = []
    for name, bench in options.benches.items():
        setups = list(dict.fromkeys([bench.setups[0], bench.setups[-1]])) if options.quick else bench.setups
        with closing(measure(name, bench, setups, options.steps, out)) as rows:
            found += rows
        write(found, out, options.device)
    print(f"\n{table([asdict(row) for row in found])}\n\nwritten to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_with_hosts("bench-network", partial(measure_layouts, parse())))
