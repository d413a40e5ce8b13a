"""GPT samples of one file or of a blend of files, as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.batch import CollateOptions
from megatron.data.blend import Blend
from megatron.data.gpt_index import SampleOrder
from megatron.data.indexed import IndexedDataset


class SampleSource(Protocol):
    """A source of samples for a loader: draws by number."""

    @property
    def collate_options(self) -> CollateOptions:
        """Options of collating its samples into a batch."""

    @property
    def seed(self) -> int:
        """The seed of the loader's own shuffle."""

    def __len__(self) -> int:
        """Number of draws."""

    def sample_id(self, index: int) -> int:
        """Identity of the sample drawn as number ``index``; reads no tokens."""

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """Writes the seq_length + 1 tokens of draw ``index`` into ``out_t``."""

    @property
    def seq_length(self) -> int:
        """Tokens of a sample, without the extra one."""


class GPTDataset:
    """Samples of one indexed file.

    Args:
        indexed: the tokens.
        order: the order of samples.
        seq_length: tokens of a sample, without the extra one.
        collate_options: options of collating samples into a batch.
        seed: seed of the cyclic loader's shuffle.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        order: SampleOrder,
        seq_length: int,
        collate_options: CollateOptions,
        seed: int = 1234,
    ) -> None:
        self.indexed = indexed
        self.order = order
        self.seq_length = seq_length
        self.collate_options = collate_options
        self.seed = seed

    def __len__(self) -> int:
        return len(self.order)

    def sample_id(self, index: int) -> int:
        """Number before the shuffle of draw ``index``."""
        return self.order.sample_id(index)

    @property
    def epoch_samples(self) -> int:
        """Draws after which all tokens have been read once."""
        return self.order.epoch_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Tokens of draw ``index``, int64 [seq_length + 1].

        Raises:
            IndexError: when the index is outside the dataset.
        """
        out_t = np.empty(self.seq_length + 1, dtype=np.int64)
        self.read(index, out_t)
        return out_t

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """See ``SampleSource``."""
        filled = 0
        for document, offset, length in self.order.spans(self.order.sample_id(index)):
            out_t[filled : filled + length] = self.indexed.get(document, offset, length)
            filled += length


class BlendedDataset:
    """Samples of several datasets, by a blend.

    Args:
        datasets: one dataset for each weight of the blend, all of the same length and collation.
        blend: the blend.

    Raises:
        UserError: when the blend draws more from a dataset than it has.
    """

    def __init__(self, datasets: Sequence[GPTDataset], blend: Blend, draws: Sequence[int]) -> None:
        for dataset, wanted in zip(datasets, draws, strict=True):
            if wanted > len(dataset):
                raise UserError(
                    f"{dataset.indexed.prefix}: the blend draws {wanted} samples of {len(dataset)}. "
                    f"Give the blend weights, or use --sample-order lazy"
                )
        self.datasets = list(datasets)
        self.blend = blend
        self.seq_length = self.datasets[0].seq_length
        self.collate_options = self.datasets[0].collate_options
        self.seed = self.datasets[0].seed

    def __len__(self) -> int:
        return len(self.blend)

    @property
    def epoch_samples(self) -> int:
        """Samples of all datasets together; the blend's weights decide how often each dataset is read."""
        return sum(dataset.epoch_samples for dataset in self.datasets)

    def sample_id(self, index: int) -> int:
        """The dataset's own id times the number of datasets, plus the dataset's number: unique in the blend."""
        dataset, number = self.blend[index]
        return self.datasets[dataset].sample_id(number) * len(self.datasets) + dataset

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Tokens of draw ``index``, int64 [seq_length + 1].

        Raises:
            IndexError: when the index is outside the dataset.
        """
        dataset, number = self.blend[index]
        return self.datasets[dataset][number]

    def read(self, index: int, out_t: NDArray[Any]) -> None:
        """See ``SampleSource``."""
        dataset, number = self.blend[index]
        self.datasets[dataset].read(number, out_t)
