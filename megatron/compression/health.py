"""Health of error feedback: size of the residuals relative to the gradients, and their age."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.ops import finite_norm


@dataclass(frozen=True)
class ResidualHealth:
    """Statistics of k tensors' last step, on their device, without synchronization.

    Args:
        gradient_k: squared norms of the gradients.
        input_k: squared norms of the compressor's input, the gradient plus the old residual.
        residual_k: squared norms of the new residual.
        age_k: energy-weighted mean age of the residual in steps: each step adds 1, and the share residual / input
            remains.
    """

    gradient_k: Tensor
    input_k: Tensor
    residual_k: Tensor
    age_k: Tensor

    def stacked(self) -> Tensor:
        """(4, k), fp64: squared norms of gradient, input and residual, and age x squared residual; all additive."""
        rows = (self.gradient_k, self.input_k, self.residual_k, self.age_k * self.residual_k)
        return torch.stack([row.double() for row in rows])


def squared_norms(x: Tensor, stacked: bool) -> Tensor:
    """Squared norms, fp64: (k) for a stack of k tensors, or (1) for a single tensor."""
    flat_kn = x.reshape(x.shape[0], -1) if stacked else x.reshape(1, -1)
    if not flat_kn.shape[0]:
        return torch.zeros(0, dtype=torch.float64, device=x.device)
    return torch.stack([finite_norm(row)[0] for row in flat_kn])


def measure(before: ResidualHealth | None, gradient_k: Tensor, input_k: Tensor, residual_k: Tensor) -> ResidualHealth:
    """Compute the statistics of a step.

    Args:
        before: statistics of the previous step; None at first.
        gradient_k, input_k, residual_k: squared norms.
    """
    age_k = torch.zeros_like(residual_k) if before is None else before.age_k
    kept_k = residual_k / input_k.clamp_min(torch.finfo(input_k.dtype).tiny)
    return ResidualHealth(gradient_k, input_k, residual_k, (age_k + 1) * kept_k.clamp(max=1.0))
