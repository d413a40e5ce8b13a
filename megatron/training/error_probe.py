"""``--check-orth-error-acti``: are compression errors orthogonal to the change of activations (Optimus-CC, Fig. 11)?

Lazy error propagation delays a micro-batch's error by one micro-batch. To first order that changes the weight gradient
by error^T (next activation - current activation), which is small when the two are nearly orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.distributed.observer import Finding, Observer, SentMessage
from megatron.distributed.policy import Position

_COLUMNS = ("boundaries", "micro_batches", "Cosine Sim", "Error AVG", "Acti Delta AVG")


class ErrorProbe(Observer):
    """Activations of a step with the errors of their gradients, held for the step.

    Activations and errors have this rank's shape (sequence, batch, hidden), whatever the parallelism.
    """

    def __init__(self) -> None:
        self._activations: dict[tuple[int, int], Tensor] = {}
        self._errors: dict[tuple[int, int], Tensor] = {}

    def on_receive(self, point: Point, position: Position, x: Tensor) -> None:
        if point is Point.PP_FWD and position.iteration >= 0:
            self._activations[position.boundary, position.micro_batch] = x.detach().clone()

    def on_send(self, sent: SentMessage) -> None:
        if sent.point is Point.PP_BWD and not sent.codec.traits.exact:
            self._errors[sent.position.boundary, sent.position.micro_batch] = sent.error().detach().clone()

    def findings(self, iteration: int) -> Iterator[Finding]:
        """For each boundary and micro-batch with a recorded successor, the cosine between the error of its gradient and
        the change of the activation to the next micro-batch, and the means of both."""
        rows = []
        for (boundary, micro_batch), error in sorted(self._errors.items(), key=lambda item: item[0]):
            activation = self._activations.get((boundary, micro_batch))
            following = self._activations.get((boundary, micro_batch + 1))
            if activation is None or following is None:
                continue
            change = (following - activation).double().flatten()
            lost = error.double().flatten()
            norms = torch.linalg.vector_norm(change) * torch.linalg.vector_norm(lost)
            cosine = float(change @ lost / norms) if norms > 0 else 0.0
            rows.append((boundary, micro_batch, cosine, float(lost.mean()), float(change.mean())))
        self._activations.clear()
        self._errors.clear()
        columns = {name: [row[at] for row in rows] for at, name in enumerate(_COLUMNS)}
        column_texts = [f"{name}: [{', '.join(f'{x:.3e}' for x in columns[name])}]" for name in _COLUMNS[2:]]
        line = " | ".join([f" errors at iteration {iteration:8d}", f"Total Length: {len(rows)}", *column_texts])
        yield Finding("orthogonality", {name.lower().replace(" ", "_"): x for name, x in columns.items()}, line)
