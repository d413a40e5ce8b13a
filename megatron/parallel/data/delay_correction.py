"""Corrections of gradients that are applied one step late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.parallel.data.param_shards import ParamShard


class DelayCorrection:
    """Base class of corrections that remember tensors of the last update.

    Args:
        shards: ranges of the parameters that this rank updates.
        strength: factor of the correction; 1 for all of it.

    ``previous`` holds a tensor for each shard; None before the first update.
    """

    name = ""
    """Value of --delay-correction."""

    def __init__(self, shards: Sequence[ParamShard], strength: float) -> None:
        self._shards, self._strength = shards, strength
        self.previous: list[Tensor] | None = None

    def allocate_previous(self) -> list[Tensor]:
        """Allocate ``previous``."""
        self.previous = [torch.zeros_like(shard.main) for shard in self._shards]
        return self.previous


class GradientExtrapolation(DelayCorrection):
    """Extrapolation of this step's gradients from the last two that were reduced: g + strength (g - g_before).

    ``previous`` holds the gradients of the last update, without a loss scale and before their extrapolation.
    """

    name = "extrapolate"

    def __init__(self, shards: Sequence[ParamShard], strength: float) -> None:
        super().__init__(shards, strength)
        self._reduced: list[Tensor] = []

    def apply(self, loss_scale: float) -> None:
        """Extrapolate the reduced gradients, in place.

        Args:
            loss_scale: the loss scale in them.
        """
        self._reduced = [shard.grad.to(shard.main.dtype) / loss_scale for shard in self._shards]
        for before, reduced, shard in zip(self.previous or (), self._reduced, self._shards, strict=bool(self.previous)):
            shard.grad.add_(((reduced - before) * (self._strength * loss_scale)).to(shard.grad.dtype))

    def end_step(self, updated: bool) -> None:
        """Remember the gradients before their extrapolation, if they have updated the parameters."""
        if updated:
            self.previous = self._reduced
        self._reduced = []


class LookAhead(DelayCorrection):
    """Extrapolation of the parameters along the last update: theta + strength (theta - theta_before).

    The last update serves as the estimate of the next, and gradients are computed at the extrapolated parameters.
    ``previous`` holds the main values before the last update.
    """

    name = "lookahead"

    def remember(self) -> None:
        """Keep the main values before an update."""
        previous = self.previous or self.allocate_previous()
        torch._foreach_copy_(previous, [shard.main for shard in self._shards])

    def move_model(self) -> None:
        """Set this rank's shards of the model's parameters to the extrapolated values."""
        for number, shard in enumerate(self._shards):
            ahead = shard.main
            if self.previous is not None:
                ahead = torch.add(ahead, ahead - self.previous[number], alpha=self._strength)
            shard.model.copy_(ahead)
