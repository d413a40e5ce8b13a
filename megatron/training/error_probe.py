"""``--check-orth-error-acti``: are compression errors orthogonal to the change of activations (Optimus-CC, Fig. 11)?

Lazy error propagation delays a micro-batch's error by one micro-batch. To first order that changes the weight gradient
by error^T (next activation - own activation), which is small when the two are nearly orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.comm.observer import Finding, Observer, SentMessage
from megatron.comm.policy import Position
from megatron.compression.points import Point


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


class ErrorProbe(Observer):
    """Collects a step's activations and errors as they pass, and pairs them; holds them for the step.

    Shapes are (sequence, batch, hidden) of this rank for both, whatever the parallelism.
    """

    def __init__(self) -> None:
        self._activations: dict[tuple[int, int], Tensor] = {}
        self._errors: dict[tuple[int, int], Tensor] = {}

    def on_receive(self, point: Point, position: Position, x: Tensor) -> None:
        if point is Point.PP_FWD and position.iteration >= 0:
            self._activations[position.boundary, position.micro_batch] = x.detach().clone()

    def on_send(self, sent: SentMessage) -> None:
        if sent.point is Point.PP_BWD and not sent.exact:
            self._errors[sent.position.boundary, sent.position.micro_batch] = sent.error().detach().clone()

    def findings(self, iteration: int) -> Iterator[Finding]:
        found = self.take()
        columns = {
            "Cosine Sim": [one.cosine for one in found],
            "Error AVG": [one.error_mean for one in found],
            "Acti Delta AVG": [one.change_mean for one in found],
        }
        shown = [f"{name}: [{', '.join(f'{x:.3e}' for x in values)}]" for name, values in columns.items()]
        values: dict[str, Any] = {
            "boundaries": [one.boundary for one in found],
            "micro_batches": [one.micro_batch for one in found],
            **{name.lower().replace(" ", "_"): column for name, column in columns.items()},
        }
        line = " | ".join([f" errors at iteration {iteration:8d}", f"Total Length: {len(found)}", *shown])
        yield Finding("orthogonality", values, line)

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
