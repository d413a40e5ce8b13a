"""Recurring samples: the same token blocks in every epoch, for codecs with per-sample state."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.data.gpt_index import Documents, LazyOrder, Span
from megatron.data.permute import Permutation, check_index, mix

_MAX_LANES = 64
_MIN_ROWS = 16


class Lanes:
    """Repeated draws of the samples of an epoch, reshuffled in each epoch.

    Samples are divided into lanes: sample k belongs to lane k modulo ``lanes``, and in every epoch draw i comes from
    lane i modulo ``lanes``. A data-parallel replica therefore sees the same samples in every epoch, on any layout where
    micro-batch size times replicas divides ``lanes``. Samples that do not fill the lanes (less than 1/16) are never
    drawn.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.lanes = 1
        while self.lanes < _MAX_LANES and self.lanes * 2 * _MIN_ROWS <= samples:
            self.lanes *= 2
        self._rows = samples // self.lanes
        self.epoch_samples = self._rows * self.lanes
        self._seed = seed

    def sample(self, index: int) -> int:
        """Sample index of draw ``index``."""
        epoch, offset = divmod(index, self.epoch_samples)
        row, lane = divmod(offset, self.lanes)
        return Permutation(self._rows, mix(self._seed, epoch, lane, 2))(row) * self.lanes + lane


class FixedOrder:
    """The first epoch of ``LazyOrder``, with its arguments, drawn repeatedly in the order of ``Lanes``."""

    def __init__(self, documents: Documents, seq_length: int, seed: int, num_samples: int) -> None:
        self._epoch = LazyOrder(documents, seq_length, seed, None)
        self._lanes = Lanes(len(self._epoch), seed)
        self.lanes, self.epoch_samples = self._lanes.lanes, self._lanes.epoch_samples
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples if self.epoch_samples else 0

    def sample_id(self, index: int) -> int:
        return self._lanes.sample(check_index(index, len(self)))

    def spans(self, sample_id: int) -> Iterator[Span]:
        return self._epoch.spans(sample_id)
