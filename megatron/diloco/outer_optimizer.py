"""The outer optimizer of islands: from differences of many steps to the anchor's next step. It never communicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.compression.outer import OuterOptions


class OuterOptimizer:
    """Anchor and momentum of the values that this rank updates.

    The anchor is the islands' common state; each island departs from it by its own inner steps. A round moves it by the
    islands' average progress (Douillard et al. 2023, algorithm 1)::

        d = anchor - values, of each island, and D their mean
        m = momentum m + D;  anchor -= lr (D + momentum m)      (Nesterov, as torch.optim.SGD has it)
        values = mixing values + (1 - mixing) anchor

    Args:
        mains: the inner optimizer's values, fp32 or fp64, which this optimizer changes in place.
        options: the point's options.
    """

    def __init__(self, mains: Sequence[Tensor], options: OuterOptions) -> None:
        self.mains = list(mains)
        self.options = options
        self.outer_params: list[Tensor] = []
        self.momentum: list[Tensor] = []

    @property
    def has_outer_params(self) -> bool:
        """Whether there is an anchor."""
        return bool(self.outer_params)

    def copy_params(self) -> None:
        """Takes the current values as the anchor, without momentum."""
        self.outer_params = [self._copy_to_outer_memory(main) for main in self.mains]
        self.momentum = [torch.zeros_like(x) for x in self.outer_params] if self.options.momentum else []

    def _copy_to_outer_memory(self, x: Tensor) -> Tensor:
        """A copy in the memory of anchor and momentum."""
        return x.to("cpu" if self.options.offload else x.device, copy=True)

    def write_pseudo_gradient(self, index: int, out: Tensor) -> None:
        """Writes anchor - values of a tensor to ``out``."""
        torch.sub(self.outer_params[index].to(out.device), self.mains[index], out=out)

    def step(self, index: int, mean: Tensor) -> None:
        """Moves the anchor of a tensor by the mean difference; overwrites ``mean``."""
        anchor, options = self.outer_params[index], self.options
        step = mean.to(anchor.device)
        if options.momentum:
            momentum = self.momentum[index]
            momentum.mul_(options.momentum).add_(step)
            step = step.add_(momentum, alpha=options.momentum)
        anchor.sub_(step, alpha=options.outer_lr)

    def mix(self, index: int, mixing: float) -> None:
        """Sets the values of a tensor to ``mixing`` * values + (1 - ``mixing``) * anchor."""
        main = self.mains[index]
        anchor = self.outer_params[index].to(main.device)
        if mixing:
            main.mul_(mixing).add_(anchor, alpha=1.0 - mixing)
        else:
            main.copy_(anchor)

    def tensors(self) -> dict[str, list[Tensor]]:
        """State tensors for a checkpoint, by kind; a tensor of each kind for each of the values."""
        return (
            {"anchor": self.outer_params, **({"momentum": self.momentum} if self.momentum else {})}
            if self.has_outer_params
            else {}
        )
