"""Keys and values of earlier positions, so that generating a token computes that token alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one stage's attention for some rows (samples), which may differ in length.

    A row's position ``j`` is valid where ``j`` is below its length. What lies behind comes from the padding of shorter
    prompts; it is masked, and overwritten as the row grows.

    Args:
        layers: global numbers of the stage's layers.
        shape: shape of each layer's keys, and of its values: (rows, key-value heads on this rank, positions, channels).
        dtype, device: those of keys and values.
        window: positions that attention looks at; None for all.
    """

    def __init__(
        self,
        layers: Iterable[int],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        def space() -> Tensor:
            # Zeros: a masked position has weight 0, and 0 times what lies in fresh memory may be no number.
            return torch.zeros(shape, dtype=dtype, device=device)

        self._held = {layer: (space(), space()) for layer in layers}
        self._rows_b = torch.arange(shape[0], device=device)
        self.capacity = shape[2]
        self._window = window
        self.lengths: list[int] = []
        self._lengths_b = torch.zeros(0, dtype=torch.int64, device=device)
        self.mask: Tensor | None = None
        """Mask of the positions that each row's newest one may attend to, (b, 1, 1, positions); None for all."""

    @property
    def positions_b1(self) -> Tensor:
        """Position of each row's next token, int64."""
        return self._lengths_b.unsqueeze(1)

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
        until = max(self.lengths) + 1
        return keys[:, :, :until], values[:, :, :until]

    def advance(self, lengths: Sequence[int] | None = None) -> None:
        """Sets the rows' lengths after a forward pass; by default one more than before."""
        self.lengths = [length + 1 for length in self.lengths] if lengths is None else list(lengths)
        self._refresh()

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all rows but these."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._rows_b.device)
        self._held = {n: (keys[index], values[index]) for n, (keys, values) in self._held.items()}
        self._rows_b = self._rows_b[: len(rows)]
        self.lengths = [self.lengths[row] for row in rows]
        self._refresh()

    def _refresh(self) -> None:
        device = self._rows_b.device
        self._lengths_b = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        longest, window = max(self.lengths), self._window
        slides = window is not None and longest >= window
        if min(self.lengths) == longest and not slides:
            self.mask = None
            return
        positions, newest_b1 = torch.arange(longest + 1, device=device), self._lengths_b.unsqueeze(1)
        seen = positions <= newest_b1
        if window is not None:
            seen &= positions > newest_b1 - window
        self.mask = seen[:, None, None]
