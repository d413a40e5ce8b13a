"""Measures the gradient's entropy over the mesh and sets the rank of ``dp-grad=edgc``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.compression.edgc import EDGCConfig, RankByEntropy, differential_entropy
from megatron.compression.points import Point
from megatron.topology.topology import Topology


class RankController:
    """One for each rank; all hold the same numbers, since every measurement is averaged over the mesh.

    Constructing it is a collective call.

    Args:
        config: the compressor's options.
        plan: whose rank is set.
        topology, ledger: where measurements are averaged, and counted.
        shape: (n, m) of this stage's largest matrices; those of the first stage, which is measured, decide.
    """

    def __init__(
        self, config: EDGCConfig, plan: CompressionPlan, topology: Topology, ledger: Ledger, shape: tuple[int, int]
    ) -> None:
        self.config, self.plan, self.topology, self.ledger = config, plan, topology, ledger
        n, m = shape if topology.is_first_stage else (0, 0)
        pair = torch.tensor([n, m])
        topology.control.all_reduce(pair, ReduceOp.MAX).wait()
        self.rule = RankByEntropy(config, (int(pair[0]), int(pair[1])))
        self._set()

    def _set(self) -> None:
        """Later stages end their backward pass earlier, so that their reduction may take longer."""
        own = self.rule.rank * (1.0 + self.config.stage_slack * self.plan.stage)
        self.plan.tune(Point.DP_GRAD, {"rank": min(round(own), self.config.rank)})

    def after_reduction(self, iteration: int, grads: Sequence[Tensor], scale: float) -> None:
        """Looks at final gradients, which carry the loss scale, and decides when a window ends. Every rank calls it."""
        if (iteration + 1) % self.config.sample_every == 0:
            self.rule.add(self._measure(grads) - math.log(scale))
        if (iteration + 1) % self.config.window == 0:
            self.rule.close_window(moves=self.plan.activation(Point.DP_GRAD).on(iteration))
            self._set()

    def _measure(self, grads: Sequence[Tensor]) -> float:
        """Mean entropy over the first stage's ranks, as EDGC has it, and over its tensors by their sizes."""
        found = [(differential_entropy(flat, self.config.sample_share), flat.numel()) for flat in grads]
        finite = [(entropy, count) for entropy, count in found if math.isfinite(entropy)]
        speaks = self.topology.is_first_stage
        pair = torch.tensor(
            [sum(h * n for h, n in finite) * speaks, float(sum(n for _, n in finite) * speaks)], dtype=torch.float64
        )
        pending = self.topology.control.all_reduce(pair)
        self.ledger.sent(Point.CONTROL, pending.sent_bytes)
        self.ledger.wait(Point.CONTROL, pending)
        total, count = pair.tolist()
        return total / count if count else math.nan

    def state_dict(self) -> dict[str, float | list[float]]:
        """For checkpoints; the same on every rank."""
        return self.rule.state_dict()

    def load_state_dict(self, state: dict[str, float | list[float]]) -> None:
        """The inverse."""
        self.rule.load_state_dict(state)
        self._set()
