"""The outer optimizer of islands: a step of the outer parameters from pseudo-gradients. It never communicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.compression.outer import OuterOptions


class OuterOptimizer:
    """Outer parameters and momentum of the values that this rank updates.

    The outer parameters are the islands' common state; each island departs from them by its own inner steps. A round
    moves them by the islands' average progress (Douillard et al. 2023, algorithm 1)::

        d = outer - values, of each island, and D their mean
        m = momentum m + D;  outer -= lr (D + momentum m)      (Nesterov, as torch.optim.SGD has it)
        values = alpha values + (1 - alpha) outer              (alpha: the option ``mixing``)

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
        """Whether the outer parameters exist."""
        return bool(self.outer_params)

    def copy_params(self) -> None:
        """Copy the current values to the outer parameters, on the CPU with ``offload``, without momentum."""
        self.outer_params = [main.to("cpu" if self.options.offload else main.device, copy=True) for main in self.mains]
        self.momentum = [torch.zeros_like(x) for x in self.outer_params] if self.options.momentum else []

    def step(self, index: int, mean: Tensor) -> None:
        """Move the outer parameters of a tensor by the mean pseudo-gradient; overwrite ``mean``."""
        outer_param, options = self.outer_params[index], self.options
        step = mean.to(outer_param.device)
        if options.momentum:
            momentum = self.momentum[index]
            momentum.mul_(options.momentum).add_(step)
            step = step.add_(momentum, alpha=options.momentum)
        outer_param.sub_(step, alpha=options.outer_lr)

    def update_params(self, index: int, alpha: float) -> None:
        """Set the values of a tensor to ``alpha`` * values + (1 - ``alpha``) * outer parameters."""
        main = self.mains[index]
        outer_param = self.outer_params[index].to(main.device)
        if alpha:
            main.mul_(alpha).add_(outer_param, alpha=1.0 - alpha)
        else:
            main.copy_(outer_param)

    def tensors(self) -> dict[str, list[Tensor]]:
        """State tensors for a checkpoint, by kind; a tensor of each kind for each of the values."""
        kinds = {"anchor": self.outer_params, "momentum": self.momentum}
        return {kind: tensors for kind, tensors in kinds.items() if tensors}
