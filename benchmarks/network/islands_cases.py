"""Cases of the benchmark of islands: trainings over several hosts, and their commands on each host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import REPO, runs
from benchmarks.convergence_cases import MODEL
from benchmarks.lab.command import format_rate
from benchmarks.lab.hosts import Lab
from megatron.config.islands import island_file

HOSTS = 2
"""Default number of hosts."""
STAGES = 2
"""Ranks of a host, each a pipeline stage."""
MICRO_BATCHES = 2
EVERY = 30
"""Local steps of a round of DiLoCo, exact or streaming."""
ISLANDS_PORT = 29600

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
"""Flags of a model with two micro-batches of 256 tokens per host, so that sums take far longer than computation."""


def global_batch(hosts: int) -> int:
    """Sequences of an iteration of all hosts."""
    return hosts * MICRO_BATCHES * int(SHAPE["micro-batch-size"])


@dataclass(frozen=True)
class Links:
    """The links between the hosts and their bridge.

    Args:
        rates: bits per second of each host's link, both ways.
    """

    rates: tuple[int, ...]

    @property
    def slowest(self) -> int:
        return min(self.rates)

    @property
    def name(self) -> str:
        """The common rate, or each host's, as in 100mbit/100mbit/20mbit."""
        return "/".join(map(format_rate, self.rates if len(set(self.rates)) > 1 else self.rates[:1]))


@dataclass(frozen=True)
class IslandsCase:
    """A training over several hosts.

    Args:
        name: name in the tables.
        spec: spec of ``--compress``, for islands without ``warmup``.
        warmup: share of a run in the synchronous warm-up; None for data parallelism over all hosts.
        every: iterations of a round.
    """

    name: str
    spec: str
    warmup: float | None = None
    every: int = EVERY

    @property
    def has_islands(self) -> bool:
        return self.warmup is not None

    @property
    def exact_warmup(self) -> bool:
        """Whether the warm-up has exact sums, as in ``EXACT_WARMUP``."""
        return "in-step=compressed" not in self.spec

    def warmup_iterations(self, iterations: int) -> int:
        """Iterations of the warm-up in a run of a length."""
        return math.ceil((1.0 if self.warmup is None else self.warmup) * iterations)

    def specs(self, iterations: int) -> list[str]:
        """Specs of a whole run."""
        return [f"{self.spec},warmup={self.warmup_iterations(iterations)}" if self.has_islands else self.spec]


BASELINE = IslandsCase("DP, bf16", "dp-grad=cast")
EXACT_WARMUP = IslandsCase("in step", f"outer=identity,every={EVERY}", 1.0)
"""A warm-up with exact sums, which is the same in all cases that have it."""
_AVERAGING = "every=10,outer-lr=1,outer-momentum=0,error-feedback=on,in-step=compressed"
_STREAMING = "outer=fixpoint,bits=4,outer-preset=streaming,in-step=compressed"
_SPARSELOCO = "outer=chunked-topk,outer-preset=sparseloco"
CASES = (
    BASELINE,
    IslandsCase("DP, PowerSGD of rank 16", "dp-grad=powersgd,rank=16"),
    IslandsCase("DiLoCo, exact, 1/3 in step", f"outer=identity,outer-preset=diloco,every={EVERY}", 1 / 3),
    IslandsCase("streaming, 4 bits, 10% in step, compressed", _STREAMING, 0.1),
    IslandsCase("SparseLoCo, 64 of 4,096 at 2 bits, 10% in step", _SPARSELOCO, 0.1, 15),
    IslandsCase(
        "averaging, PowerSGD of rank 8, 1/3 in step, compressed", f"outer=powersgd,rank=8,{_AVERAGING}", 1 / 3, 10
    ),
    IslandsCase("averaging, 4 bits, 10% in step, compressed", f"outer=fixpoint,bits=4,{_AVERAGING}", 0.1, 10),
    IslandsCase("averaging, 2 bits, 10% in step, compressed", f"outer=fixpoint,bits=2,{_AVERAGING}", 0.1, 10),
    IslandsCase("averaging, 2 bits, 5% in step, compressed", f"outer=fixpoint,bits=2,{_AVERAGING}", 0.05, 10),
)


@dataclass(frozen=True)
class IslandsRun:
    """A run of a case, or a part of a run.

    Args:
        case: the case.
        iterations: iterations of the run.
        log: file of its JSON lines.
        text: folder of the text.
        values: additional flags, which override the usual flags.
        specs: specs of ``--compress`` instead of the case's.
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
        """Return the command line of ``pretrain_gpt.py``."""
        length = {"global-batch-size": global_batch(self.hosts), "seed": self.seed, "train-iters": self.iterations}
        values = {**MODEL, **SHAPE, **length, **self.values}
        values["lr-warmup-iters"] = min(values["lr-warmup-iters"], self.iterations - 1)
        specs = self.case.specs(self.iterations) if self.specs is None else self.specs
        return [str(REPO / "pretrain_gpt.py"), *runs.flags(values, specs, self.text, self.log)]

    def logs(self) -> list[Path]:
        """Its log files, the first island's first."""
        return [Path(island_file(str(self.log), k)) for k in range(self.hosts)] if self.case.has_islands else [self.log]

    def commands(self, lab: Lab) -> list[tuple[int, Sequence[str]]]:
        """Hosts and their commands: an island on each, or a replica, so that only gradients cross the links."""
        words = self.words()
        if not self.case.has_islands:
            # Consecutive ranks are different replicas of a stage; the stages of a replica are on the same host.
            ranks = self.hosts * STAGES
            return [(rank % self.hosts, lab.node(rank, ranks, words, 1)) for rank in range(ranks)]
        address = f"{lab.address(0)}:{ISLANDS_PORT}"
        launcher = [str(REPO / "tools" / "launch.py"), "--standalone", f"--nproc-per-node={STAGES}"]
        launcher += [f"--islands={self.hosts}"]
        return [
            (k, [*launcher, f"--island={k}", f"--{'islands-address' if k else 'serve-islands'}={address}", *words])
            for k in range(self.hosts)
        ]
