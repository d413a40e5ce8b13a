"""The order of a task's samples: whole epochs of whole batches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.fixed_order import Lanes
from megatron.data.permute import Permutation, mix

_TASK_ORDER = 3
"""Tells these orders from others of the same seed."""


@dataclass(frozen=True)
class EpochPlace:
    """What a draw is.

    Args:
        sample: number of the sample.
        counts: whether its label counts: no draw that only fills a batch does.
    """

    sample: int
    counts: bool


class Epochs:
    """Draws of samples, each epoch of which is a whole number of batches.

    Args:
        samples: number of samples.
        batch: samples of a batch.
        keep_last: what is left at the end of an epoch makes a last batch, filled up with samples that do not count;
            otherwise it is left out of this epoch.
        shuffle: each epoch has an order of its own; otherwise that of the files.
        recurring: shuffle as ``Lanes``, for codecs that remember samples.
        seed: seed of the orders.
    """

    def __init__(
        self, samples: int, batch: int, *, keep_last: bool, shuffle: bool = True, recurring: bool = False, seed: int = 0
    ) -> None:
        self._lanes = Lanes(samples, seed) if recurring else None
        self._samples = samples if self._lanes is None else self._lanes.epoch_samples
        self._shuffle = shuffle
        self._seed = seed
        self.batches = -(-self._samples // batch) if keep_last else self._samples // batch
        self.draws = self.batches * batch

    @property
    def real_samples(self) -> int:
        """Samples of an epoch without those that only fill its last batch."""
        return min(self.draws, self._samples)

    @property
    def lanes(self) -> int | None:
        """Number of lanes, where samples recur in them."""
        return None if self._lanes is None else self._lanes.lanes

    def at(self, draw: int) -> EpochPlace:
        """What draw number ``draw`` of the run is."""
        epoch, inside = divmod(draw, self.draws)
        place = inside % self._samples
        counts = inside < self._samples
        if self._lanes is not None:
            return EpochPlace(self._lanes.sample(epoch * self._samples + place), counts)
        if self._shuffle:
            place = Permutation(self._samples, mix(self._seed, epoch, _TASK_ORDER))(place)
        return EpochPlace(place, counts)
