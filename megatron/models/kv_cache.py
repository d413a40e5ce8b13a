"""KV cache for incremental decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of a stage's attention layers, for rows (samples) of different lengths.

    A row's position ``j`` is valid if ``j`` is below its length. Later positions hold the padding of shorter prompts;
    they are masked, and overwritten as the row grows.

    A layer's first keys and values decide their shape, dtype and memory, which is allocated once for all positions.
    Write positions and masks are tensors: steps of equal ``shape`` launch the same kernels on the same memory, so they
    can be recorded as a CUDA graph and replayed.

    Args:
        windows: sliding-window size by global layer number; None for full attention.
        rows: number of rows.
        capacity: maximum number of positions of a row.
        device: device of keys and values.
        block: granularity in positions of a step's shape, so that the shape changes rarely.
    """

    def __init__(
        self,
        windows: Mapping[int, int | None],
        rows: int,
        capacity: int,
        device: torch.device,
        block: int = 1,
    ) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows_b = torch.arange(rows, device=device)
        self.capacity = capacity
        self._windows = windows
        self._block = block
        self.lengths: list[int] = []
        self._step_extent = 0
        self._lengths_b = torch.zeros(rows, dtype=torch.int64, device=device)
        self._growing_b = torch.ones(rows, dtype=torch.int64, device=device)
        self._growing = set(range(rows))
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._rows_b)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of positions that the next step reads."""
        return self.rows, self._extent

    @property
    def positions_b1(self) -> Tensor:
        """Position of each row's next token, int64."""
        return self._lengths_b.unsqueeze(1)

    @property
    def _extent(self) -> int:
        longest = max(self.lengths) + 1
        return min(-(-longest // self._block) * self._block, self.capacity)

    def begin_step(self) -> None:
        """Begin a step of a single position per row; part of the recorded computation."""
        self._step_extent = self._extent
        self._masks = {window: self._make_mask(window) for window in set(self._windows.values())}

    def mask(self, layer: int) -> Tensor | None:
        """Mask of the positions that each row's newest position may attend to, (b, 1, 1, positions); None for all."""
        return self._masks.get(self._windows[layer])

    def _make_mask(self, window: int | None) -> Tensor | None:
        slides = window is not None and max(self.lengths) >= window
        if self._block == 1 and min(self.lengths) + 1 == self._step_extent and not slides:
            return None
        newest_b1 = self._lengths_b.unsqueeze(1)
        positions = torch.arange(self._step_extent, device=newest_b1.device)
        visible = positions <= newest_b1
        if window is not None:
            visible &= positions > newest_b1 - window
        return visible[:, None, None]

    def extend(self, layer: int, key_bgsd: Tensor, value_bgsd: Tensor) -> tuple[Tensor, Tensor]:
        """Append positions to a layer's keys and values; return the cached keys and values.

        The first call for a layer passes the prompts, padded at the end; each later call passes one position per row.
        """
        if layer not in self._tensors:
            # Zeros: a masked position has weight 0, and 0 times uninitialized memory may be NaN.
            keys, values = (x.new_zeros((*x.shape[:2], self.capacity, x.shape[3])) for x in (key_bgsd, value_bgsd))
            self._tensors[layer] = keys, values
        keys, values = self._tensors[layer]
        if not self.lengths:
            length = key_bgsd.shape[2]
            keys[:, :, :length] = key_bgsd
            values[:, :, :length] = value_bgsd
            return key_bgsd, value_bgsd
        keys[self._rows_b, :, self._lengths_b] = key_bgsd[:, :, 0]
        values[self._rows_b, :, self._lengths_b] = value_bgsd[:, :, 0]
        return keys[:, :, : self._step_extent], values[:, :, : self._step_extent]

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the rows' lengths after the prefill."""
        self.lengths = list(lengths)
        self._lengths_b.copy_(torch.tensor(self.lengths, dtype=torch.int64))

    def advance(self) -> None:
        """Advance the lengths of the growing rows by one position."""
        self.lengths = [length + (row in self._growing) for row, length in enumerate(self.lengths)]
        self._lengths_b += self._growing_b

    def grow_only(self, rows: Collection[int]) -> None:
        """End all rows except ``rows``; further steps overwrite the first position of an ended row.

        An ended row may have filled the cache, so that it has no next position.
        """
        self._growing = set(rows)
        self._growing_b.copy_(torch.tensor([int(row in self._growing) for row in range(self.rows)], dtype=torch.int64))
        self.lengths = [length * (row in self._growing) for row, length in enumerate(self.lengths)]
        self._lengths_b *= self._growing_b

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows except ``rows``; the remaining rows are copied to new memory and grow."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._rows_b.device)
        self._tensors = {n: (keys[index], values[index]) for n, (keys, values) in self._tensors.items()}
        self._rows_b, self._growing = self._rows_b[: len(rows)], set(range(len(rows)))
        self._lengths_b, self._growing_b = self._lengths_b[index], torch.ones_like(index)
        self.lengths = [self.lengths[row] for row in rows]

    def clear(self) -> None:
        """Reset the cache in the same memory."""
        for keys, values in self._tensors.values():
            keys.zero_()
            values.zero_()
        self.lengths, self._masks = [], {}
        self.grow_only(range(self.rows))
