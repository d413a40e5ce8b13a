"""Sample sources of a loader: rows of integers by draw, from a file or from a blend of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.batch import Batch
from megatron.data.blend import LazyBlend, MegatronBlend


class SampleSource(Protocol):
    """Interface of a sample source: a row of integers per draw, and the collation of rows into a batch."""

    @property
    def row_length(self) -> int:
        """Number of integers per row."""

    @property
    def resets_positions(self) -> bool:
        """Whether position ids differ from the indices in the sequence."""

    @property
    def epoch_samples(self) -> int:
        """Number of draws in a pass over all samples."""

    @property
    def lanes(self) -> int | None:
        """Number of ``Lanes`` if the same samples recur in every epoch; otherwise None."""

    def __len__(self) -> int:
        """Number of draws."""

    def sample_id(self, index: int) -> int:
        """Id of the sample at draw ``index``; reads no tokens."""

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Row of draw ``index``."""

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """Write the row of draw ``index`` into ``out_t``."""

    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        """Collate rows into a batch."""


class RowIndexing:
    """Base class of sample sources, with ``__getitem__``."""

    def __getitem__(self: SampleSource, index: int) -> NDArray[np.int64]:
        """The row of draw ``index``, int64 [row_length].

        Raises:
            IndexError: when the index is outside the source.
        """
        out_t = np.empty(self.row_length, dtype=np.int64)
        self.read(index, out_t)
        return out_t


class FileSamples(SampleSource, Protocol):
    """Sample source of a single file."""

    @property
    def name(self) -> str:
        """File name in messages."""


class BlendedDataset(RowIndexing):
    """Blend of the samples of several datasets.

    Args:
        datasets: a dataset per weight of the blend; all use the same row layout.
        blend: the blend.
        draws: number of draws of the blend from each dataset.

    Raises:
        UserError: when the blend draws more from a dataset than it has.
    """

    def __init__(self, datasets: Sequence[FileSamples], blend: LazyBlend | MegatronBlend, draws: Sequence[int]) -> None:
        for dataset, num_draws in zip(datasets, draws, strict=True):
            if num_draws > len(dataset):
                raise UserError(
                    f"{dataset.name}: the blend draws {num_draws} samples of {len(dataset)}. "
                    f"Give the blend weights, or use --sample-order lazy"
                )
        self.datasets = list(datasets)
        self.draws = list(draws)
        self.blend = blend
        self.row_length = self.datasets[0].row_length
        self.resets_positions = self.datasets[0].resets_positions
        self.collate = self.datasets[0].collate
        self.lanes: int | None = None

    def __len__(self) -> int:
        return len(self.blend)

    @property
    def epoch_samples(self) -> int:
        """Total samples of all datasets; the weights of the blend decide how often each dataset is read."""
        return sum(dataset.epoch_samples for dataset in self.datasets)

    def sample_id(self, index: int) -> int:
        """The dataset's sample id times the number of datasets, plus the dataset's index: unique in the blend."""
        dataset, number = self.blend[index]
        return self.datasets[dataset].sample_id(number) * len(self.datasets) + dataset

    def read(self, index: int, out_t: NDArray[Any]) -> None:
        dataset, number = self.blend[index]
        self.datasets[dataset].read(number, out_t)
