"""Base class of the BERT and T5 datasets: samples of consecutive sentences of an indexed file."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.batch import Batch
from megatron.data.indexed import IndexedDataset
from megatron.data.masking import WordMasker
from megatron.data.sentence_order import SentenceOrder
from megatron.data.source import RowIndexing
from megatron.tokenizer.wordpiece import WordPieceIds


class MaskedDataset(RowIndexing, ABC):
    """Samples of an indexed file of sentences; subclasses mask the words that ``masker`` selects."""

    row_length: int
    resets_positions = False

    def __init__(self, indexed: IndexedDataset, order: SentenceOrder, ids: WordPieceIds, masker: WordMasker) -> None:
        self.indexed = indexed
        self.order = order
        self.ids = ids
        self.masker = masker
        self.name = indexed.prefix
        self.lanes, self.epoch_samples = order.lanes, order.epoch_samples

    def __len__(self) -> int:
        return len(self.order)

    def sample_id(self, index: int) -> int:
        return self.order.sample_id(index)

    @abstractmethod
    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """See ``SampleSource``."""

    @abstractmethod
    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        """See ``SampleSource``."""


def copy_columns(rows_bt: NDArray[np.int64], begin: int, length: int) -> torch.Tensor:
    """Copy columns [begin, begin + length) of a batch of rows into a tensor."""
    return torch.from_numpy(np.ascontiguousarray(rows_bt[:, begin : begin + length]))


def padding_segments(lengths_b: NDArray[np.int64], length: int) -> torch.Tensor:
    """Segment ids int32 [b, length]: 0 for text, 1 for the padding after it."""
    return torch.from_numpy((np.arange(length) >= lengths_b[:, None]).astype(np.int32))


def position_ids(batch: int, length: int) -> torch.Tensor:
    """Position ids int64 [batch, length]."""
    return torch.arange(length).repeat(batch, 1)
