"""Keys and values of earlier positions, so that generating a token computes that token alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one stage's attention for some rows (samples), which may differ in length.

    A row's position ``j`` is valid where ``j`` is below its length. What lies behind comes from the padding of shorter
    prompts; it is masked, and overwritten as the row grows.

    All memory is there from the start, and where a step writes and what it masks are tensors: steps of equal
    ``shape`` launch the same work on the same memory, so they can be recorded once and replayed.

    Args:
        windows: by the global number of each of the stage's layers, the positions that it looks at; None for all.
        shape: shape of each layer's keys, and of its values: (rows, key-value heads on this rank, positions, channels).
        dtype, device: those of keys and values.
        block: a step looks at a multiple of this many positions, so that the shape changes as seldom.
    """

    def __init__(
        self,
        windows: Mapping[int, int | None],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        block: int = 1,
    ) -> None:
        def space() -> Tensor:
            # Zeros: a masked position has weight 0, and 0 times what lies in fresh memory may be no number.
            return torch.zeros(shape, dtype=dtype, device=device)

        self._held = {layer: (space(), space()) for layer in windows}
        self._rows_b = torch.arange(shape[0], device=device)
        self.capacity = shape[2]
        self._windows = windows
        self._block = block
        self.lengths: list[int] = []
        self._seen = 0
        self._lengths_b = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self._growing_b = torch.ones(shape[0], dtype=torch.int64, device=device)
        self._growing = set(range(shape[0]))
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._rows_b)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and positions that the next step looks at."""
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
        """Begins a step of one position for each row; part of what is recorded."""
        self._seen = self._extent
        self._masks = {window: self._masked(window) for window in set(self._windows.values())}

    def mask(self, layer: int) -> Tensor | None:
        """Mask of the positions that each row's newest one may attend to, (b, 1, 1, positions); None for all."""
        return self._masks.get(self._windows[layer])

    def _masked(self, window: int | None) -> Tensor | None:
        slides = window is not None and max(self.lengths) >= window
        if self._block == 1 and min(self.lengths) + 1 == self._seen and not slides:
            return None
        newest_b1 = self._lengths_b.unsqueeze(1)
        positions = torch.arange(self._seen, device=newest_b1.device)
        seen = positions <= newest_b1
        if window is not None:
            seen &= positions > newest_b1 - window
        return seen[:, None, None]

    def extend(self, layer: int, key_bgsd: Tensor, value_bgsd: Tensor) -> tuple[Tensor, Tensor]:
        """Adds positions to a layer's keys and values, and returns all that may be attended to.

        The first call for a layer brings the prompts, padded at their ends; each later one a position of each row.
        """
        keys, values = self._held[layer]
        if not self.lengths:
            length = key_bgsd.shape[2]
            keys[:, :, :length] = key_bgsd
            values[:, :, :length] = value_bgsd
            return key_bgsd, value_bgsd
        keys[self._rows_b, :, self._lengths_b] = key_bgsd[:, :, 0]
        values[self._rows_b, :, self._lengths_b] = value_bgsd[:, :, 0]
        return keys[:, :, : self._seen], values[:, :, : self._seen]

    def start(self, lengths: Sequence[int]) -> None:
        """Sets the rows' lengths after the pass over the prompts."""
        self.lengths = list(lengths)
        self._lengths_b.copy_(torch.tensor(self.lengths, dtype=torch.int64))

    def advance(self) -> None:
        """Adds the step's position to the rows that grow."""
        self.lengths = [length + (row in self._growing) for row, length in enumerate(self.lengths)]
        self._lengths_b += self._growing_b

    def grow_only(self, rows: Collection[int]) -> None:
        """Lets all rows but these stay as long as they are: each further step writes over their next position."""
        self._growing = set(rows)
        self._growing_b.copy_(torch.tensor([int(row in self._growing) for row in range(self.rows)], dtype=torch.int64))

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which grow; what is left has other memory."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._rows_b.device)
        self._held = {n: (keys[index], values[index]) for n, (keys, values) in self._held.items()}
        self._rows_b, self._growing = self._rows_b[: len(rows)], set(range(len(rows)))
        self._lengths_b, self._growing_b = self._lengths_b[index], torch.ones_like(index)
        self.lengths = [self.lengths[row] for row in rows]

    def clear(self) -> None:
        """Makes it as new, in the same memory."""
        for keys, values in self._held.values():
            keys.zero_()
            values.zero_()
        self.lengths, self._masks = [], {}
        self.grow_only(range(self.rows))
