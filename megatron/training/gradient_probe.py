"""Where the largest gradients are, and whether they stay there, on which Top-K with a lasting choice rests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.ops import abs_topk
from megatron.parallel.data.buffer import FlatBuffer

Figures = dict[str, float | list[int]]
"""Of a parameter."""


class GradientProbe:
    """Compares the places of the largest gradients of each matrix with those of the last look.

    Args:
        density: share of a matrix that is "the largest".
        bins: equal parts of a matrix in which they are counted; 0 where that is not asked for.
    """

    def __init__(self, density: float, bins: int = 0) -> None:
        self.density = density
        self.bins = bins
        self._places: dict[str, Tensor] = {}

    def look(self, buffers: Sequence[FlatBuffer]) -> dict[str, Figures]:
        """By parameter: ``energy``, the squared norm's share of the largest, ``kept``, the share that was there at
        the last look (none at the first), and ``places``, how many of them are in each part."""
        found: dict[str, Figures] = {}
        for buffer in buffers:
            for bucket in buffer.buckets:
                for slot in bucket.slots:
                    if slot.param.dim() > 1:
                        found[slot.logical_name] = self._one(
                            slot.logical_name, buffer.grads_flat[slot.start : slot.stop]
                        )
        return found

    def _one(self, name: str, grad: Tensor) -> Figures:
        grad = grad.float()
        places = abs_topk(grad.view(1, -1), max(int(self.density * grad.numel()), 1))[0]
        before = self._places.get(name)
        self._places[name] = places
        total = grad.square().sum()
        energy = float(grad[places].square().sum() / total) if total > 0 else 0.0
        figures: Figures = {"energy": energy}
        if before is not None and before.shape == places.shape:
            figures["kept"] = float(torch.isin(places, before, assume_unique=True).float().mean())
        if self.bins:
            bins = min(self.bins, grad.numel())
            figures["places"] = torch.bincount(places * bins // grad.numel(), minlength=bins).tolist()
        return figures
