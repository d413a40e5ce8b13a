"""Health of error feedback: size of the residuals relative to the gradients, and their age."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.ops import finite_norm


@dataclass(frozen=True)
class ResidualHealth:
    """Figures of k tensors' last step, on their device; nothing here waits for it.

    Args:
        gradient_k: squared norms of the gradients.
        given_k: squared norms of the compressor's input, the gradient with the old residual.
        residual_k: squared norms of the new residual.
        age_k: mean age in steps of what the residual holds, weighted by energy: each step all of it grows one step
            older, and the share residual / given of it stays.
    """

    gradient_k: Tensor
    given_k: Tensor
    residual_k: Tensor
    age_k: Tensor

    def stacked(self) -> Tensor:
        """(4, k), fp64: squared norms of gradient, given and residual, and age x squared residual; they add up."""
        rows = (self.gradient_k, self.given_k, self.residual_k, self.age_k * self.residual_k)
        return torch.stack([row.double() for row in rows])


def squared_norms(x: Tensor, stacked: bool) -> Tensor:
    """Squared norms (k) of a stack of k tensors, or (1) of one, fp64."""
    flat_kn = x.reshape(x.shape[0], -1) if stacked else x.reshape(1, -1)
    if not flat_kn.shape[0]:
        return torch.zeros(0, dtype=torch.float64, device=x.device)
    return torch.stack([finite_norm(row)[0] for row in flat_kn])


def measure(before: ResidualHealth | None, gradient_k: Tensor, given_k: Tensor, residual_k: Tensor) -> ResidualHealth:
    """Computes the figures of a step.

    Args:
        before: figures of the step before it; None at first.
        gradient_k, given_k, residual_k: squared norms.
    """
    age_k = torch.zeros_like(residual_k) if before is None else before.age_k
    kept_k = residual_k / given_k.clamp_min(torch.finfo(given_k.dtype).tiny)
    return ResidualHealth(gradient_k, given_k, residual_k, (age_k + 1) * kept_k.clamp(max=1.0))
