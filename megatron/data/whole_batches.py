"""Single pass over a dataset in full batches, with padding draws in the last batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.batch import Batch
from megatron.data.permute import check_index
from megatron.data.source import RowIndexing, SampleSource

NO_ORDER = -100
"""Sentence-order label that the loss ignores: the default ``ignore_index`` of torch's cross-entropy."""


@runtime_checkable
class PaddedSource(Protocol):
    """A source with padding draws in its last batch, which do not count."""

    @property
    def real_samples(self) -> int:
        """Number of samples without padding draws."""


class WholeBatches(RowIndexing):
    """All draws of a dataset, at least 1, followed by padding draws up to a full global batch, which do not count."""

    def __init__(self, dataset: SampleSource, batch: int) -> None:
        self._dataset = dataset
        self._length = -(-len(dataset) // batch) * batch
        self.row_length = dataset.row_length
        self.resets_positions = dataset.resets_positions
        self.epoch_samples = dataset.epoch_samples
        self.real_samples = len(dataset)
        self.lanes: int | None = None

    def __len__(self) -> int:
        return self._length

    def sample_id(self, index: int) -> int:
        return self._dataset.sample_id(self._sample_index(index))

    def read(self, index: int, out_t: NDArray[Any]) -> None:
        self._dataset.read(self._sample_index(index), out_t)

    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        batch = self._dataset.collate(rows_bt, sample_ids_b, draw_ids_b)
        is_padding_b = torch.from_numpy(draw_ids_b >= self.real_samples)
        if batch.loss_mask_bs is None or not bool(is_padding_b.any()):
            return batch
        mask_bs = batch.loss_mask_bs.masked_fill(is_padding_b[:, None], 0.0)
        order_b = None if batch.order_b is None else batch.order_b.masked_fill(is_padding_b, NO_ORDER)
        return replace(batch, loss_mask_bs=mask_bs, order_b=order_b)

    def _sample_index(self, index: int) -> int:
        return check_index(index, self._length) % self.real_samples
