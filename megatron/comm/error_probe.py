"""``--check-orth-error-acti``: are compression errors orthogonal to the change of activations (Optimus-CC, Fig. 11)?

Lazy error propagation delays a micro-batch's error by one micro-batch. To first order that changes the weight gradient
by error^T (next activation - own activation), which is small when the two are nearly orthogonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Orthogonality:
    """One micro-batch at one boundary.

    Args:
        boundary, micro_batch: which.
        cosine: between the error of its gradient and the change of the activation to the next micro-batch's.
        error_mean, change_mean: means of both tensors.
    """

    boundary: int
    micro_batch: int
    cosine: float
    error_mean: float
    change_mean: float


class ErrorProbe:
    """Collects a step's activations and errors as they pass, and pairs them; holds them for the step.

    Shapes are (sequence, batch, hidden) of this rank for both, whatever the parallelism.
    """

    def __init__(self) -> None:
        self._activations: dict[tuple[int, int], Tensor] = {}
        self._errors: dict[tuple[int, int], Tensor] = {}

    def activation(self, boundary: int, micro_batch: int, x_sbh: Tensor) -> None:
        """What came over a boundary."""
        self._activations[boundary, micro_batch] = x_sbh.detach().clone()

    def error(self, boundary: int, micro_batch: int, error_sbh: Tensor) -> None:
        """What the gradient that went back lacks."""
        self._errors[boundary, micro_batch] = error_sbh.detach().clone()

    def take(self) -> list[Orthogonality]:
        """The pairs of the step, in order; forgets them."""
        found = []
        for (boundary, micro_batch), error in sorted(self._errors.items(), key=lambda item: item[0]):
            own = self._activations.get((boundary, micro_batch))
            following = self._activations.get((boundary, micro_batch + 1))
            if own is None or following is None:
                continue
            change = (following - own).double().flatten()
            lost = error.double().flatten()
            norms = torch.linalg.vector_norm(change) * torch.linalg.vector_norm(lost)
            cosine = float(change @ lost / norms) if norms > 0 else 0.0
            found.append(Orthogonality(boundary, micro_batch, cosine, float(lost.mean()), float(change.mean())))
        self._activations.clear()
        self._errors.clear()
        return found
