"""Trains the same model on hosts with shaped links: uncompressed, compressed, and with torch's own DDP hooks.

    sudo make bench-network                              every layout, about an hour
    sudo make bench-network ARGS="--layouts pp4 --quick" one layout, its first and last link
    sudo make bench-network ARGS="--device cuda"         ranks on this machine's GPU, over NCCL

Each host is a network namespace. On CPUs it has its share of the processors, and a link has the rate at which the
uncompressed fp32 traffic takes as long, relative to the computing time measured here, as in the published set-up (see
setups.py). On a GPU, models are larger, links have the rates of their names, and all time except waiting and coding
counts as computing. Prints Markdown tables, and writes them with every measurement to --out.
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

from benchmarks import parse_names
from benchmarks.lab.hosts import Lab, LabError, run_with_hosts
from benchmarks.network.cases import BENCHES, CUDA_BENCHES, FP32, Bench, NetworkCase, plan_of
from benchmarks.network.setups import Setup
from benchmarks.network.worker import config_of
from benchmarks.report import Column, Table, device_name, header, write_record
from megatron.base.atomic import write_whole
from megatron.parallel.pipeline.list_schedule import AUTO
from megatron.planner.choice import make_choice
from megatron.planner.cluster import Cluster, format_cluster
from megatron.planner.measure import fill_in_measured
from megatron.planner.predict import Predictor
from megatron.training.schedule_choice import STEPS

WARM_STEPS = 3
"""Steps on fast links before a measurement: first visits of samples, exact steps before a peer's hook."""
PAYLOAD = 1448 / 1514
"""TCP's share of a full Ethernet frame."""
START_SECONDS = 300.0
STEP_SECONDS = 900.0
UNCOMPRESSED = ("fp32 traffic", "bf16 traffic")
TABLE = Table(
    Column("case", "case"),
    Column("s / iteration", "seconds", ".2f"),
    Column("predicted", "predicted_s", ".2f"),
    Column("tokens/s", "tokens_per_s", ".0f"),
    Column("compute s", "compute_s", ".2f"),
    Column("on the slowest", "slowest_compute_s", ".2f"),
    Column("update s", "update_s", ".2f"),
    Column("coding s", "coded_s", ".3f"),
    Column("exposed s", "waited_s", ".2f"),
    Column("MB a host", "host_mb", ".2f"),
    Column("x fp32", UNCOMPRESSED[0], ".2f"),
    Column("x bf16", UNCOMPRESSED[1], ".2f"),
)


@dataclass(frozen=True)
class Measurement:
    """The measurement of a case on a link.

    Args:
        layout, setup, rate: the link, and its rate in bits per second; None if unshaped.
        case: name of the case.
        seconds: time of an iteration on the slowest rank, the median.
        tokens_per_s: tokens per second of the whole run.
        compute_s, coded_s, waited_s: seconds of an iteration, means over the ranks.
        slowest_compute_s: seconds of computing on the slowest rank, a lower bound for every schedule.
        update_s: seconds of the optimizer's update, the mean over the ranks; None for a peer.
        host_mb: MB that a host sends in an iteration, by its interface's counter; the largest over the hosts.
        loss: loss of the last step.
        predicted_s: the planner's time of an iteration; None for a case that it cannot predict.
        waited: time of waiting by point, where it is known.
    """

    layout: str
    setup: str
    rate: float | None
    case: str
    seconds: float
    tokens_per_s: float
    compute_s: float
    slowest_compute_s: float
    update_s: float | None
    coded_s: float
    waited_s: float
    host_mb: float
    loss: float
    predicted_s: float | None
    waited: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return a line of progress."""
        predicted = "" if self.predicted_s is None else f" (predicted {self.predicted_s:.2f})"
        return f"  {self.setup}: {self.case}: {self.seconds:.2f} s{predicted}"


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
        """Give a command to all ranks and wait for the answer of rank 0.

        Raises:
            LabError: when the ranks are gone, or too slow.
        """
        write_whole(self.folder / f"command{self._number}.json", json.dumps(command).encode())
        answer_file, deadline = self.folder / f"result{self._number}.json", time.monotonic() + timeout
        self._number += 1
        while not answer_file.exists():
            if self._status is not None:
                raise LabError(f"the ranks ended with status {self._status}; their messages are above")
            if time.monotonic() > deadline:
                raise LabError(f"no answer within {timeout:g} s to {command}")
            time.sleep(0.02)
        answer: list[dict[str, float]] = json.loads(answer_file.read_text())
        return answer

    def take_steps(self, count: int, long_seconds: float, settling: int) -> tuple[list[dict[str, float]], float]:
        """Take some steps, or a single long step; return their times, and the megabytes that the busiest host sends in
        a step. Each time, ``settling`` steps before them are not measured."""
        before = self.lab.traffic()
        steps = self.ask(STEP_SECONDS, do="steps", steps=1, settling=settling)
        num_taken = settling + 1
        if count > 1 and steps[0]["seconds"] < long_seconds:
            steps += self.ask(STEP_SECONDS, do="steps", steps=count - 1, settling=settling)
            num_taken += settling + count - 1
        traffic = [end - start for end, start in zip(self.lab.traffic(), before, strict=True)]
        return steps, max(host.sent for host in traffic) / 1e6 / num_taken

    def stop(self) -> None:
        """End the ranks."""
        if self._status is None:
            (self.folder / f"command{self._number}.json").write_text('{"do": "stop"}')
            self._thread.join(60)


@contextmanager
def start_workers(bench: Bench) -> Iterator[Workers]:
    """Start hosts with equal shares of the processors, and ranks on them."""
    # Ranks on a GPU need the processors to launch its work.
    share = (os.cpu_count() or 1) / bench.hosts if bench.device == "cpu" else None
    lab = Lab([None] * bench.hosts, share, bench.device)
    with tempfile.TemporaryDirectory(prefix="bench-network-") as folder, lab:
        workers = Workers(lab, bench, Path(folder))
        yield workers
        workers.stop()  # after an exception the laboratory ends them


def link_rate(bench: Bench, setup: Setup, computed: dict[str, float]) -> float:
    """Return the rate in bits per second at which uncompressed traffic takes ``ratio`` times as long as computing.

    ``computed`` are the figures of an uncompressed step on unshaped links.
    """
    if setup.rate is not None:
        return setup.rate
    _, hidden, sequence = bench.model
    seconds = setup.ratio * computed["slowest_compute_s"]
    if bench.paced_by == "message":
        # Tensor-parallel ranks of a host each send the whole activation over its link.
        senders = min(bench.tp, bench.ranks_per_host)
        return senders * sequence * hidden * 32 / (seconds / bench.micro_batches)
    if bench.paced_by == "experts":
        return bench.sent_to_experts * 8 / (seconds / bench.micro_batches)
    return 2 * (bench.dp - 1) / bench.dp * bench.parameters * 32 / seconds


def rate_text(rate: float | None) -> str:
    """Format a link's rate in Mb/s."""
    return "unshaped" if rate is None else f"{rate / 1e6:.3g} Mb/s"


def apply_rate(cluster: Cluster, rate: float | None) -> Cluster:
    """Limit a cluster's links to a rate that includes the frames around the payload."""
    if rate is None:
        return cluster
    payload_rate = min(cluster.across.gbit_per_s, rate / 1e9 * PAYLOAD)
    return replace(cluster, across=replace(cluster.across, gbit_per_s=payload_rate))


def predict_seconds(bench: Bench, case: NetworkCase, cluster: Cluster | None) -> float | None:
    """Predict the seconds of an iteration with the planner; None if it cannot."""
    if case.peer or cluster is None:
        return None
    config = config_of(plan_of(bench), case, cluster.gpus)
    return Predictor(config, cluster, bench.vocab).predict(make_choice(config, cluster.gpus)).seconds


def measure_cluster(name: str, bench: Bench, workers: Workers, out: Path) -> Cluster:
    """Measure the hosts as a cluster of the planner, and write it to the folder ``out``."""
    specs = sorted({spec for case in bench.cases for spec in case.specs})
    (rates,) = workers.ask(STEP_SECONDS, do="measure", specs=specs, ranks_per_host=bench.ranks_per_host)
    cluster = fill_in_measured(rates, Cluster(name, bench.hosts * bench.ranks_per_host, bench.ranks_per_host))
    (out / f"cluster-{name}.yaml").write_text(format_cluster(cluster))
    return cluster


def shape_links(lab: Lab, rate: float | None) -> None:
    """Give all links a rate."""
    for host in range(len(lab.rates)):
        lab.shape(host, None if rate is None else int(rate))


def measure(
    name: str,
    bench: Bench,
    setups: Sequence[Setup],
    steps: int,
    out: Path,
    *,
    unshaped: bool = True,
    is_wanted: Callable[[str, str], bool] = lambda setup, case: True,
    long_seconds: float = math.inf,
) -> Generator[Measurement, None, None]:
    """Measure every case on every link of a layout.

    Args:
        name, bench: name of the layout, and the layout.
        setups: set-ups of its links.
        steps: steps per measurement.
        out: folder of the planner's cluster.
        unshaped: whether to measure on unshaped links as well.
        is_wanted: whether to measure a case on a link (the first argument); called before its measurement.
        long_seconds: time of a step above which it is not repeated.
    """
    tokens = bench.micro_batch * bench.micro_batches * bench.dp * bench.model[2]
    with start_workers(bench) as workers:
        first = workers.ask(START_SECONDS, do="build", case=asdict(FP32), steps=3)
        computed = {key: statistics.median(step[key] for step in first[1:]) for key in first[0]}
        print(
            f"{name}: an iteration computes for {computed['slowest_compute_s']:.2f} s on the slowest rank, "
            f"and takes {computed['seconds']:.2f} s on unshaped links",
            flush=True,
        )
        # Ranks that share a GPU compute at varying speeds, and experts are not planned.
        planned = bench.device == "cpu" and not bench.experts
        cluster = measure_cluster(name, bench, workers, out) if planned else None
        rates: dict[str, float | None] = {"unshaped": None} if unshaped else {}
        for setup in setups:
            rates[setup.name] = link_rate(bench, setup, computed)
            ratio_text = f"ratio {setup.ratio:.3f}, here {rate_text(rates[setup.name])}"
            print(f"  {setup.name}: {setup.arithmetic}; {ratio_text}", flush=True)
        for case in bench.cases:
            built = False
            for setup_name, rate in rates.items():
                if not is_wanted(setup_name, case.name):
                    continue
                chooses = case.schedule == AUTO  # a schedule for each link
                if not built or chooses:
                    shape_links(workers.lab, rate if chooses else None)
                    steps_before = WARM_STEPS + STEPS if chooses else WARM_STEPS
                    workers.ask(STEP_SECONDS, do="build", case=asdict(case), steps=steps_before)
                    built = True
                shape_links(workers.lab, rate)
                # Ranks wait for each other after each command, which empties a pipeline without a flush.
                answers, sent_mb = workers.take_steps(steps, long_seconds, settling=0 if case.flush else 1)
                median = {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}
                measurement = Measurement(
                    name, setup_name, rate, case.name, median["seconds"], tokens / median["seconds"],
                    median["compute_s"], median["slowest_compute_s"], median.get("update_s"), median["coded_s"],
                    median["waited_s"], sent_mb, answers[-1]["loss"],
                    predict_seconds(bench, case, cluster and apply_rate(cluster, rate)),
                    {key.removeprefix("waited "): s for key, s in median.items() if key.startswith("waited ") and s},
                )  # fmt: skip
                print(measurement.line(), flush=True)
                yield measurement


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for each layout and link: time, its parts, bytes, and speed-ups over uncompressed traffic."""
    links: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        links.setdefault((row["layout"], row["setup"]), []).append(row)
    texts = []
    for (layout, setup), group in links.items():
        seconds = {row["case"]: row["seconds"] for row in reversed(group)}
        bases = [case for case in UNCOMPRESSED if case in seconds]
        lines = [{**row, **{case: seconds[case] / row["seconds"] for case in bases}} for row in group]
        texts.append(f"### {layout}, {setup} ({rate_text(group[0]['rate'])} here)\n\n{TABLE.text(lines)}")
    return "\n\n".join(texts)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the chosen layouts are in ``benches``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layouts_text = f"{', '.join(BENCHES)}; with --device cuda of {', '.join(CUDA_BENCHES)}"
    parser.add_argument("--layouts", help=f"comma-separated, of {layouts_text} (all)")
    parser.add_argument(
        "--cases", metavar="WORDS", help="comma-separated: only the cases with one of these words in their names"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the ranks (cpu)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each case on each link (2)")
    parser.add_argument("--quick", action="store_true", help="only the first and the last link of each layout")
    parser.add_argument("--out", help="folder of all results (bench_out/network, or network-cuda with --device cuda)")
    options = parser.parse_args(words)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; leave it out to train over gloo")
    layouts = CUDA_BENCHES if cuda else BENCHES
    names = parse_names(parser, "--layouts", options.layouts, layouts)
    options.benches = {name: layouts[name] for name in names}
    case_words = [word.strip().lower() for word in (options.cases or "").split(",") if word.strip()]
    for name, bench in options.benches.items() if options.cases is not None else ():
        cases = tuple(case for case in bench.cases if any(word in case.name.lower() for word in case_words))
        if not cases:
            case_names = "; ".join(case.name for case in bench.cases)
            parser.error(f"--cases {options.cases}: no case of {name} matches; it has {case_names}")
        options.benches[name] = replace(bench, cases=cases)
    options.out = Path(options.out or ("bench_out/network-cuda" if cuda else "bench_out/network"))
    return options


def measure_layouts(options: argparse.Namespace) -> int:
    """Measure the chosen layouts, and write all measurements after each layout."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, bench in options.benches.items():
        setups = list(dict.fromkeys([bench.setups[0], bench.setups[-1]])) if options.quick else bench.setups
        with closing(measure(name, bench, setups, options.steps, out)) as measurements:
            rows += map(asdict, measurements)
        write_record(out / "rows.json", header(device_name(options.device)), rows=rows)
        (out / "table.md").write_text(tables(rows) + "\n")
    print(f"\n{tables(rows)}\n\nwritten to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_with_hosts("bench-network", partial(measure_layouts, parse())))
