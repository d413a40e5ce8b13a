"""Bounded map from samples to rows of equal size, evicted in lockstep at both ends of a boundary.

When the row size changes (longer sequences), all samples are forgotten.

Deciding what a message contains (``visit``) is separate from storing its rows (``store``), because a receiver decides
when it posts the receive, before earlier messages have arrived. Both ends decide in the order of the messages, so they
agree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.compression.row_store import RowStore


class SampleCache:
    """LRU cache of rows by sample, committed or rolled back with the optimizer's step.

    Args:
        capacity: maximum number of samples.
        memory: maximum number of rows in memory; the others are in a file. None for all.
        folder: folder of that file; None for the system's temporary folder.
    """

    def __init__(self, capacity: int, memory: int | None = None, folder: str | None = None) -> None:
        self.capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()
        self._order_before: OrderedDict[int, None] | None = None
        self._evicted: set[int] = set()
        self._size: int | None = None
        self._size_before: int | None = None
        self._rows = RowStore(memory, folder)
        self._staged: dict[int, Tensor] = {}

    def visit(self, sample: int, size: int) -> bool:
        """Return whether the sample is cached, and add it if not; the least recently used sample may be evicted.

        Args:
            sample: the sample.
            size: elements of its row.
        """
        if self._order_before is None:
            self._order_before, self._size_before = self._order.copy(), self._size
        if size != self._size:
            self._order.clear()
            self._staged.clear()
            self._size = size
        is_cached = sample in self._order
        self._order[sample] = None
        self._order.move_to_end(sample)
        if len(self._order) > self.capacity:
            self._evicted.add(self._order.popitem(last=False)[0])
        return is_cached

    def predict_visits(self, samples: Iterable[int], size: int) -> list[bool]:
        """Predict the results of ``visit`` for these samples in order, without changing the cache."""
        order, answers = self._order.copy() if size == self._size else OrderedDict[int, None](), []
        for sample in samples:
            answers.append(sample in order)
            order[sample] = None
            order.move_to_end(sample)
            if len(order) > self.capacity:
                order.popitem(last=False)
        return answers

    def expect(self, sample: int, size: int) -> None:
        """Prefetch the row of a sample, if it is cached and of this size."""
        if size == self._size and sample in self._order and sample not in self._staged:
            self._rows.prefetch(sample)

    def row(self, sample: int) -> Tensor:
        """The row last stored for a sample whose visit returned True."""
        staged = self._staged.get(sample)
        return self._rows.get(sample) if staged is None else staged

    def store(self, sample: int, row: Tensor) -> None:
        """Store a row for the next visit."""
        self._staged[sample] = row

    def commit(self) -> None:
        """Keep this step's rows. Drop rows of evicted samples, which this step's messages may still have needed."""
        if self._order_before is not None and self._size != self._size_before:
            self._rows = RowStore(self._rows.memory, self._rows.folder)
        for sample, row in self._staged.items():
            self._rows.put(sample, row)
        self._staged.clear()
        if self._order_before is not None:
            for sample in self._evicted:
                if sample not in self._order:
                    self._rows.discard(sample)
        self._evicted.clear()
        self._order_before = None

    def rollback(self) -> None:
        """Discard this step's visits and rows."""
        if self._order_before is not None:
            self._order, self._size = self._order_before, self._size_before
        self._order_before = None
        self._evicted.clear()
        self._staged.clear()

    def export(self) -> tuple[Tensor, Tensor] | None:
        """Samples (n), least recently used first, and their rows (n, ...), on the CPU; None if empty."""
        if not self._order:
            return None
        samples = list(self._order)
        rows = [row if row.is_meta else row.cpu() for row in map(self._rows.peek, samples)]
        return torch.tensor(samples, dtype=torch.int64), torch.stack(rows)

    def load(self, samples: Tensor, rows: Tensor) -> None:
        """Restore samples and rows from ``export``, dropping the oldest beyond the capacity."""
        pairs = list(zip(samples.tolist(), rows, strict=True))[-self.capacity :]
        self._order = OrderedDict((sample, None) for sample, _ in pairs)
        for sample in self._rows.names():
            self._rows.discard(sample)
        self._size = rows[0].numel() if pairs else None
        for sample, row in pairs:
            self._rows.put(sample, row.clone())

    def __len__(self) -> int:
        return len(self._order)
