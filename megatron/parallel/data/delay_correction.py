"""Corrections of gradients that are applied one step late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.parallel.data.param_shards import ParamShard


class DelayCorrection:
    """Base of the corrections, which remember something of the last update.

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
    """Estimates the gradients of this step from the last two that are there: g + strength (g - g_before).

    ``previous`` holds the last applied gradients without a loss scale, as they were reduced.
    """

    name = "extrapolate"

    def apply(self, loss_scale: float) -> None:
        """Extrapolate the reduced gradients, in place.

        Args:
            loss_scale: the loss scale in them.
        """
        previous = self.previous
        for before, shard in zip(previous or self.allocate_previous(), self._shards, strict=True):
            reduced = shard.grad.to(before.dtype) / loss_scale
            if previous is not None:
                shard.grad.add_(((reduced - before) * (self._strength * loss_scale)).to(shard.grad.dtype))
            before.copy_(reduced)


class LookAhead(DelayCorrection):
    """Computes gradients where the coming update is expected to lead: theta + strength (theta - theta_before).

    The update to come is known but for the gradients in flight; the last one is its estimate. ``previous`` holds the
    main values before the last update.
    """

    name = "lookahead"

    def remember(self) -> None:
        """Keep the main values before an update."""
        previous = self.previous or self.allocate_previous()
        torch._foreach_copy_(previous, [shard.main for shard in self._shards])

    def values(self) -> list[Tensor]:
        """Values of the shards at which the next gradients are computed."""
        mains = [shard.main for shard in self._shards]
        if self.previous is None:
            return mains
        steps = torch._foreach_sub(mains, self.previous)
        return list(torch._foreach_add(mains, steps, alpha=self._strength))
