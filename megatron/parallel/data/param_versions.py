"""Two versions of the parameters, for passes of two steps in turn (PipeDream-2BW, Narayanan et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.parallel.data.buffer import FlatBuffer


class ParamVersions:
    """Copies of the parameters at the beginning of the last two steps.

    Backward passes of a step need the values of its forward passes, while forward passes of the next step already use
    updated values. Autograd keeps a parameter rather than its values, so ``select`` exchanges the memory of all
    parameters before a pass. The memory of a step does not change until its last backward has run, so views of
    parameters that autograd keeps stay valid, too.

    Args:
        buffers: buffers of all chunks, which hold the newest values.
    """

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._buffers = buffers
        self._copies = [[torch.empty_like(buffer.params_flat) for buffer in buffers] for _ in range(2)]
        memory: dict[int | None, list[Tensor]] = {
            **dict(enumerate(self._copies)),
            None: [buffer.params_flat for buffer in buffers],
        }
        # All parameters with their views of each version's memory.
        self._values = {
            version: [
                (slot.param, flat[slot.start : slot.stop].view(slot.param.shape))
                for buffer, flat in zip(buffers, flats, strict=True)
                for bucket in buffer.buckets
                for slot in bucket.slots
            ]
            for version, flats in memory.items()
        }
        self._selected: int | None = None

    def begin_step(self, iteration: int) -> None:
        """Copy the current values for a step, over those of the step before the last."""
        for buffer, copy in zip(self._buffers, self._copies[iteration % 2], strict=True):
            copy.copy_(buffer.params_flat)

    def select(self, iteration: int | None) -> None:
        """Set the parameters to the values of one of the last two steps; None for the newest values."""
        version = None if iteration is None else iteration % 2
        if version == self._selected:
            return
        self._selected = version
        for param, values in self._values[version]:
            param.data = values
