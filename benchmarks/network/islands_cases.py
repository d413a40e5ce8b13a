"""Cases of the benchmark of islands: what trains over two hosts, and the commands of a run on each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import REPO, runs
from benchmarks.convergence_cases import MODEL
from benchmarks.lab.command import describe
from benchmarks.lab.hosts import Lab
from benchmarks.network.cases import Bench, NetworkCase
from megatron.config.islands import file_of

HOSTS = 2
"""Hosts, unless the command line has another number."""
STAGES = 2
"""Ranks of a host, each a pipeline stage."""
MICRO_BATCHES = 2
EVERY = 30
"""Local steps of a round of DiLoCo, exact or streaming."""
PLACE_PORT = 29600

SHAPE: dict[str, Any] = {
    "num-layers": 6,
    "hidden-size": 256,
    "num-attention-heads": 4,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "untie-embeddings-and-output-weights": True,
    "micro-batch-size": 4,
    "pipeline-model-parallel-size": STAGES,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-warmup-iters": 20,
    "adam-beta2": 0.95,
    "log-interval": 1,
}
"""Two micro-batches of 256 tokens on each host: a sum at each step then takes far longer than the computation."""


def global_batch(hosts: int) -> int:
    """Sequences of an iteration of all hosts."""
    return hosts * MICRO_BATCHES * int(SHAPE["micro-batch-size"])


@dataclass(frozen=True)
class Links:
    """The links of the hosts, which a bridge joins.

    Args:
        rates: bits per second of each host's link, both ways.
    """

    rates: tuple[int, ...]

    @property
    def slowest(self) -> int:
        return min(self.rates)

    @property
    def name(self) -> str:
        """The one rate of all; or each, as in 100mbit/100mbit/20mbit."""
        return "/".join(map(describe, self.rates if len(set(self.rates)) > 1 else self.rates[:1]))


def name_of(links: Links | None) -> str:
    """The name of links; None: not shaped."""
    return describe(None) if links is None else links.name


@dataclass(frozen=True)
class IslandsCase:
    """Training over several hosts.

    Args:
        name: name in the tables.
        spec: spec of ``--compress``, for islands without ``warmup``.
        in_step: share of a run in which islands go in step; None for data parallelism over all hosts, one world.
        every: iterations of a round.
    """

    name: str
    spec: str
    in_step: float | None = None
    every: int = EVERY

    @property
    def has_islands(self) -> bool:
        return self.in_step is not None

    @property
    def sums_exactly(self) -> bool:
        """Whether steps in step are those of ``IN_STEP``."""
        return "in-step=compressed" not in self.spec

    def steps_in_step(self, iterations: int) -> int:
        """Iterations before the first local one, of a run of so many."""
        return math.ceil((1.0 if self.in_step is None else self.in_step) * iterations)

    def specs(self, iterations: int) -> list[str]:
        """Specs of a whole run."""
        return [f"{self.spec},warmup={self.steps_in_step(iterations)}" if self.has_islands else self.spec]


BASELINE = IslandsCase("DP, bf16", "dp-grad=cast")
IN_STEP = IslandsCase("in step", f"outer=identity,every={EVERY}", 1.0)
"""The exact steps that islands begin with, which are the same in all cases that have them."""
_AVERAGED = "every=10,outer-lr=1,outer-momentum=0,error-feedback=on,in-step=compressed"
QUICKEST = IslandsCase(
    "averaging, 2 bits, 5% in step, compressed", f"outer=fixpoint,bits=2,{_AVERAGED}", 0.05, every=10
)
CASES = (
    BASELINE,
    IslandsCase("DP, PowerSGD of rank 16", "dp-grad=powersgd,rank=16"),
    IslandsCase("DiLoCo, exact, 1/3 in step", f"outer=identity,outer-preset=diloco,every={EVERY}", 1 / 3),
    IslandsCase(
        "streaming, 4 bits, 10% in step, compressed",
        "outer=fixpoint,bits=4,outer-preset=streaming,in-step=compressed",
        0.1,
    ),
    IslandsCase(
        "SparseLoCo, 64 of 4,096 at 2 bits, 10% in step", "outer=chunked-topk,outer-preset=sparseloco", 0.1, every=15
    ),
    IslandsCase(
        "averaging, PowerSGD of rank 8, 1/3 in step, compressed",
        f"outer=powersgd,rank=8,{_AVERAGED}",
        1 / 3,
        every=10,
    ),
    IslandsCase("averaging, 4 bits, 10% in step, compressed", f"outer=fixpoint,bits=4,{_AVERAGED}", 0.1, every=10),
    IslandsCase("averaging, 2 bits, 10% in step, compressed", f"outer=fixpoint,bits=2,{_AVERAGED}", 0.1, every=10),
    QUICKEST,
)


def bench_of(hosts: int, stages: int, cases: tuple[NetworkCase, ...] = ()) -> Bench:
    """The model on ranks that take single steps: on each host a replica of so many stages."""
    model = (SHAPE["num-layers"], SHAPE["hidden-size"], SHAPE["seq-length"])
    micro_batch = SHAPE["micro-batch-size"]
    return Bench(
        hosts, stages, 1, stages, model, MICRO_BATCHES, (), cases, micro_batch=micro_batch, vocab=runs.VOCAB_SIZE
    )


@dataclass(frozen=True)
class IslandsRun:
    """A run of a case, or a part of one.

    Args:
        case: what is trained.
        iterations: iterations of the run.
        log: file of its records.
        text: folder of the text.
        values: further flags, which override the usual ones.
        specs: specs of ``--compress``; None for the case's own.
        hosts: number of hosts.
        seed: seed of the run.
    """

    case: IslandsCase
    iterations: int
    log: Path
    text: Path
    values: dict[str, Any]
    specs: tuple[str, ...] | None = None
    hosts: int = HOSTS
    seed: int = 1

    def words(self) -> list[str]:
        """The command line of ``pretrain_gpt.py``."""
        own = {"global-batch-size": global_batch(self.hosts), "seed": self.seed, "train-iters": self.iterations}
        values = {**MODEL, **SHAPE, **own, **self.values}
        values["lr-warmup-iters"] = min(values["lr-warmup-iters"], self.iterations - 1)
        specs = self.case.specs(self.iterations) if self.specs is None else self.specs
        return [str(REPO / "pretrain_gpt.py"), *runs.flags(values, specs, self.text, self.log)]

    def logs(self) -> list[Path]:
        """The logs that it writes, the first one first."""
        return [Path(file_of(str(self.log), k)) for k in range(self.hosts)] if self.case.has_islands else [self.log]

    def commands(self, lab: Lab) -> list[tuple[int, Sequence[str]]]:
        """What each host runs: an island; or, of one world, a replica, whose gradients alone use the link."""
        words = self.words()
        if not self.case.has_islands:
            # Ranks count replicas fastest, and stages of a replica are on one host.
            ranks = self.hosts * STAGES
            return [(rank % self.hosts, lab.node(rank, ranks, words, 1)) for rank in range(ranks)]
        place = f"{lab.address(0)}:{PLACE_PORT}"
        launcher = [str(REPO / "tools" / "launch.py"), "--standalone", f"--nproc-per-node={STAGES}"]
        launcher += [f"--islands={self.hosts}"]
        return [
            (k, [*launcher, f"--island={k}", f"--{'islands-address' if k else 'serve-islands'}={place}", *words])
            for k in range(self.hosts)
        ]
