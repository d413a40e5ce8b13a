"""``--log-gradients``: positions of the largest gradients over time; long-lived Top-K masks need stable positions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.agreement import gather_texts
from megatron.distributed.observer import Finding, Observer
from megatron.distributed.topology import Topology
from megatron.kernels.ops import abs_topk
from megatron.parallel.data.buffer import FlatBuffer

Figures = dict[str, float | list[int]]
"""Statistics of a parameter."""


class GradientProbe(Observer):
    """Comparison of the positions of the largest gradients between samplings.

    Gradients are read when the optimizer's step begins: it may replace them with its update, for a compressor.

    Args:
        buffers: buffers of this rank's gradients.
        topology: the mesh; the first replica and tensor-parallel rank of each stage take part.
        density: fraction of a matrix that counts as "the largest".
        bins: number of equal parts of a matrix in which positions are counted; 0 if not requested.
        interval: iterations between samplings.
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], topology: Topology, density: float, bins: int = 0, interval: int = 1
    ) -> None:
        self.buffers = buffers
        self.topology = topology
        self.density = density
        self.bins = bins
        self.interval = interval
        self._places: dict[str, Tensor] = {}
        self._is_due = False
        self._statistics: dict[str, Figures] = {}

    def begin_step(self, iteration: int) -> None:
        self._is_due = iteration >= 0 and (iteration + 1) % self.interval == 0
        self._statistics = {}

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        if name == "optimizer" and self._is_due and self.topology.tp.rank == 0:
            self._statistics = self.look()
        return nullcontext()

    def findings(self, iteration: int) -> Iterator[Finding]:
        if iteration % self.interval:
            return
        parameters: dict[str, Figures] = {}
        for text in gather_texts(self.topology.control.pg, json.dumps(self._statistics)):
            parameters.update(json.loads(text))
        yield Finding("gradients", {"density": self.density, "parameters": parameters})

    def look(self) -> dict[str, Figures]:
        """Compute the statistics of each parameter for which this rank is the first replica: ``energy``, the largest
        gradients' share of the squared norm; ``kept``, the share of their positions that was the same at the last
        sampling (absent at the first); and ``places``, the number of positions in each part."""
        statistics: dict[str, Figures] = {}
        for buffer in self.buffers:
            for slot in (slot for bucket in buffer.buckets for slot in bucket.slots if buffer.group.rank == 0):
                if slot.param.dim() > 1:
                    grad = buffer.reduced_flat[slot.start : slot.stop].float()
                    places = abs_topk(grad.view(1, -1), max(int(self.density * grad.numel()), 1))[0]
                    before = self._places.get(slot.logical_name)
                    self._places[slot.logical_name] = places
                    total = grad.square().sum()
                    energy = float(grad[places].square().sum() / total) if total > 0 else 0.0
                    figures: Figures = {"energy": energy}
                    if before is not None and before.shape == places.shape:
                        figures["kept"] = float(torch.isin(places, before, assume_unique=True).float().mean())
                    if self.bins:
                        bins = min(self.bins, grad.numel())
                        figures["places"] = torch.bincount(places * bins // grad.numel(), minlength=bins).tolist()
                    statistics[slot.logical_name] = figures
        return statistics
