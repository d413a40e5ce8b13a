"""What a loader reads: rows of numbers by draw, from one file or from a blend of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.batch import Batch
from megatron.data.blend import Blend


class SampleSource(Protocol):
    """A source of samples for a loader: draws by number, each a row of integers, and what a batch of rows is."""

    @property
    def row_length(self) -> int:
        """Integers of a row."""

    @property
    def resets_positions(self) -> bool:
        """Whether positions are other than the places in the sequence."""

    @property
    def epoch_samples(self) -> int:
        """Draws after which everything has been read once."""

    @property
    def lanes(self) -> int | None:
        """Where the same samples return in every epoch: the ``Lanes`` in which they do. Else None."""

    def __len__(self) -> int:
        """Number of draws."""

    def sample_id(self, index: int) -> int:
        """Identity of the sample drawn as number ``index``; reads no tokens."""

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """The row of draw ``index``."""

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """Writes the row of draw ``index`` into ``out_t``."""

    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        """Makes a batch of rows."""


class FileSamples(SampleSource, Protocol):
    """Samples of one file."""

    @property
    def name(self) -> str:
        """The file in messages."""


class BlendedDataset:
    """Samples of several datasets, by a blend.

    Args:
        datasets: one dataset for each weight of the blend, with rows of the same kind.
        blend: the blend.
        draws: draws of the blend from each dataset.

    Raises:
        UserError: when the blend draws more from a dataset than it has.
    """

    def __init__(self, datasets: Sequence[FileSamples], blend: Blend, draws: Sequence[int]) -> None:
        for dataset, wanted in zip(datasets, draws, strict=True):
            if wanted > len(dataset):
                raise UserError(
                    f"{dataset.name}: the blend draws {wanted} samples of {len(dataset)}. "
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
        """Samples of all datasets together; the blend's weights decide how often each dataset is read."""
        return sum(dataset.epoch_samples for dataset in self.datasets)

    def sample_id(self, index: int) -> int:
        """The dataset's own id times the number of datasets, plus the dataset's number: unique in the blend."""
        dataset, number = self.blend[index]
        return self.datasets[dataset].sample_id(number) * len(self.datasets) + dataset

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """The row of draw ``index``, int64 [row_length].

        Raises:
            IndexError: when the index is outside the dataset.
        """
        return row(self, index)

    def read(self, index: int, out_t: NDArray[Any]) -> None:
        """See ``SampleSource``."""
        dataset, number = self.blend[index]
        self.datasets[dataset].read(number, out_t)


def row(source: SampleSource, index: int) -> NDArray[np.int64]:
    """The row of a draw, int64 [row_length]."""
    out_t = np.empty(source.row_length, dtype=np.int64)
    source.read(index, out_t)
    return out_t
