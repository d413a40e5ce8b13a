"""GPT samples of an indexed file, as NumPy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.data.batch import Batch, CollateOptions, collate
from megatron.data.fixed_order import FixedOrder
from megatron.data.gpt_index import SampleOrder
from megatron.data.indexed import IndexedDataset
from megatron.data.source import RowIndexing


class GPTDataset(RowIndexing):
    """GPT samples of an indexed file, of ``seq_length`` tokens and an extra label token."""

    def __init__(
        self,
        indexed: IndexedDataset,
        order: SampleOrder,
        seq_length: int,
        collate_options: CollateOptions,
    ) -> None:
        self.indexed = indexed
        self.order = order
        self.seq_length = seq_length
        self.collate_options = collate_options
        self.name = indexed.prefix
        self.row_length = seq_length + 1
        self.epoch_samples = order.epoch_samples
        self.resets_positions = collate_options.reset_position_ids
        self.lanes = order.lanes if isinstance(order, FixedOrder) else None

    def __len__(self) -> int:
        return len(self.order)

    def sample_id(self, index: int) -> int:
        """Index of draw ``index`` before the shuffle."""
        return self.order.sample_id(index)

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        position = 0
        for document, offset, length in self.order.spans(self.order.sample_id(index)):
            out_t[position : position + length] = self.indexed.get(document, offset, length)
            position += length

    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        return collate(rows_bt, sample_ids_b, draw_ids_b, self.collate_options)
