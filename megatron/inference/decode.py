"""Decoding step by step: feeds the newest tokens of growing rows to a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.inference.model import LoadedModel
from megatron.model.context import ForwardContext
from megatron.model.kv_cache import KVCache


class Decoder:
    """Decodes rows that grow by one token between calls, with a cache of keys and values.

    The first call reads the rows whole, in one pass; later ones compute one position of each. A row that has outgrown
    the model's window is read anew from its last ``window`` tokens each time, as its positions all change.

    Args:
        model: a loaded model; every rank of it makes the same calls.
        positions: most positions that the rows will reach; the cache gets no larger than the window.
        cached: whether to keep keys and values; without, every call reads the rows whole.
    """

    def __init__(self, model: LoadedModel, positions: int, cached: bool = True) -> None:
        self.model = model
        self.positions = min(positions, model.window)
        self.cached = cached
        self._cache: KVCache | None = None
        self._held: list[int] = []

    def newest(self, numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Hidden states (1, b, h) of the last token of some rows; None but on the last stage.

        Args:
            numbers: numbers of the rows: those of the last call, or fewer.
            rows: tokens of the rows.
        """
        fits = max(map(len, rows)) <= self.model.window
        if self._cache is None or not fits:
            self._cache = None
            return self._read(numbers, [row[-self.model.window :] for row in rows], keep=self.cached and fits)
        self._drop(numbers)
        tokens_b1 = torch.tensor([row[-1:] for row in rows], device=self.model.device)
        context = ForwardContext(position_ids_bs=self._cache.positions_b1, cache=self._cache)
        x_1bh = self.model.hidden(tokens_b1, context)
        self._cache.advance()
        return x_1bh

    def _read(self, numbers: Sequence[int], rows: Sequence[Sequence[int]], *, keep: bool) -> Tensor | None:
        lengths = [len(row) for row in rows]
        longest, padding = max(lengths), self.model.tokenizer.eod
        tokens_bs = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=self.model.device)
        if keep:
            self._cache, self._held = self.model.new_cache(len(rows), self.positions), list(numbers)
        x_sbh = self.model.hidden(tokens_bs, ForwardContext(cache=self._cache))
        if self._cache is not None:
            self._cache.advance(lengths)
        if x_sbh is None:
            return None
        last_b = torch.tensor(lengths, device=x_sbh.device) - 1
        return x_sbh[last_b, torch.arange(len(rows), device=x_sbh.device)].unsqueeze(0)

    def _drop(self, numbers: Sequence[int]) -> None:
        """Drops rows that have ended; nothing moves in memory when none has."""
        assert self._cache is not None
        if len(numbers) < len(self._held):
            place = {number: at for at, number in enumerate(self._held)}
            self._cache.keep([place[number] for number in numbers])
            self._held = list(numbers)
