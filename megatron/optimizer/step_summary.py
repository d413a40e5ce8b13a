"""Numbers of a step that all ranks sum, so that every rank takes the same decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

import torch

from megatron.compression.points import Point
from megatron.distributed.ledger import Ledger
from megatron.distributed.topology import Topology
from megatron.parallel.data.sync_warmup import SyncWarmup


@dataclass(frozen=True)
class StopVotes:
    """Number of ranks that ask to stop the run, by reason.

    Args:
        duration: the time limit is over.
        signal: a signal has come.
        kill_switch: the kill-switch file exists.
    """

    duration: float = 0.0
    signal: float = 0.0
    kill_switch: float = 0.0


NO_VOTES = StopVotes()


@dataclass(frozen=True)
class StepSummary:
    """A rank's numbers of a step, or their sums over all ranks.

    Args:
        losses: sum of each loss in nats and the number of items that count in it, by name; the same names on all ranks.
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

    def all_reduce(self, topology: Topology, ledger: Ledger, warmup: SyncWarmup) -> StepSummary:
        """Sum over the world; losses and votes also over the islands that go in step, whose gradients are equal."""
        shared = [*(number for pair in self.losses.values() for number in pair), *astuple(self.votes)]
        values = [*shared, self.grad_sq, self.params_sq, self.num_zeros, self.not_finite]
        vector = torch.tensor(values, dtype=torch.float64, device=topology.device)
        ledger.complete(Point.CONTROL, topology.world.all_reduce(vector))
        warmup.all_reduce([vector[: len(shared)]])
        *shared, grad_sq, params_sq, num_zeros, not_finite = vector.tolist()
        sums = iter(shared)
        losses = {name: (next(sums), next(sums)) for name in self.losses}
        return replace(
            self,
            losses=losses,
            votes=StopVotes(*sums),
            grad_sq=grad_sq,
            params_sq=params_sq,
            num_zeros=num_zeros,
            not_finite=not_finite,
        )
