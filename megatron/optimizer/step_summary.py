"""Numbers of a step that all ranks sum, so that every rank takes the same decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.distributed.group import Pending
from megatron.distributed.ledger import Ledger
from megatron.distributed.topology import Topology
from megatron.parallel.data.sync_warmup import SyncWarmup


class ExitReason(IntEnum):
    """The reason why a run ends, or pauses, before its last iteration. The greatest reason wins when ranks differ."""

    NONE = 0
    CHOICE = 1
    INTERVAL = 2
    DURATION = 3
    SIGNAL = 4
    KILL_SWITCH = 5
    DIVERGED = 6


@dataclass(frozen=True)
class StopVotes:
    """Number of ranks that ask to stop the run, or to pause it, by reason.

    Args:
        choice: to choose the compressors again.
        duration: the time limit has passed.
        signal: a signal has arrived.
        kill_switch: the kill-switch file exists.
    """

    choice: float = 0.0
    duration: float = 0.0
    signal: float = 0.0
    kill_switch: float = 0.0


NO_VOTES = StopVotes()


@dataclass(frozen=True)
class StepSummary:
    """A rank's numbers of a step, or their sums over all ranks.

    Args:
        losses: sum of each loss in nats and its number of items, by name; the same names on all ranks.
        votes: requests to stop.
        grad_sq: sum of squares of the scaled gradients.
        params_sq: sum of squares of the parameters.
        num_zeros: number of gradient elements that are exactly zero.
        not_finite: 1 if gradients that a later step applies are not finite.
    """

    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    votes: StopVotes = NO_VOTES
    grad_sq: float = 0.0
    params_sq: float = 0.0
    num_zeros: float = 0.0
    not_finite: float = 0.0

    @property
    def counted(self) -> float:
        """Number of items in all losses together."""
        return sum(count for _, count in self.losses.values())

    @property
    def usable(self) -> bool:
        """Whether gradients that a later step applies are finite, and the losses have items."""
        return not self.not_finite and self.counted > 0

    @property
    def mean_losses(self) -> dict[str, float]:
        """Mean of each loss in nats, by name; zero for a loss without items."""
        return {name: total / count if count else 0.0 for name, (total, count) in self.losses.items()}

    def all_reduce(self, topology: Topology, ledger: Ledger, warmup: SyncWarmup) -> StepSummary:
        """Sum over the world; see ``start_all_reduce``."""
        return self.start_all_reduce(topology, ledger, warmup).wait()

    def start_all_reduce(self, topology: Topology, ledger: Ledger, warmup: SyncWarmup) -> PendingSummary:
        """Start to sum over the world, and losses and votes also over the islands while they train in synchrony."""
        shared = [*(number for pair in self.losses.values() for number in pair), *astuple(self.votes)]
        values = [*shared, self.grad_sq, self.params_sq, self.num_zeros, self.not_finite]
        vector = torch.tensor(values, dtype=torch.float64, device=topology.device)
        return PendingSummary(self, vector, len(shared), topology.world.all_reduce_numbers(vector), ledger, warmup)


@dataclass(frozen=True)
class PendingSummary:
    """Sums of a summary over all ranks, in flight."""

    summary: StepSummary
    vector: Tensor
    num_shared: int
    pending: Pending
    ledger: Ledger
    warmup: SyncWarmup

    def wait(self) -> StepSummary:
        """Wait for the sums."""
        self.ledger.complete(Point.CONTROL, self.pending)
        self.warmup.all_reduce([self.vector[: self.num_shared]])
        *shared, grad_sq, params_sq, num_zeros, not_finite = self.vector.tolist()
        sums = iter(shared)
        losses = {name: (next(sums), next(sums)) for name in self.summary.losses}
        return StepSummary(losses, StopVotes(*sums), grad_sq, params_sq, num_zeros, not_finite)
