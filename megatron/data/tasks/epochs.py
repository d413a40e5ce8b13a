"""Sample order of fine-tuning tasks: complete epochs of full batches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.fixed_order import Lanes
from megatron.data.permute import Permutation, mix

_TASK_ORDER = 3
"""Stream id that separates these shuffles from others with the same seed."""


@dataclass(frozen=True)
class EpochSample:
    """Sample of a draw, which may be padding.

    Args:
        sample: index of the sample.
        counts: whether the label counts; False for padding draws.
    """

    sample: int
    counts: bool


class Epochs:
    """Draws of samples in epochs of full batches.

    Args:
        samples: number of samples.
        batch: batch size.
        keep_last: pad the last, incomplete batch of an epoch with samples that do not count; otherwise drop it.
        shuffle: shuffle each epoch; otherwise keep the order of the files.
        recurring: shuffle in ``Lanes``, for codecs with per-sample state.
        seed: seed of the shuffles.

    ``draws`` and ``real_samples`` are the numbers of draws and samples per epoch, with and without padding; ``lanes``
    is None unless samples recur.
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
        self.real_samples = min(self.draws, self._samples)
        self.lanes = None if self._lanes is None else self._lanes.lanes

    def sample_at(self, draw: int) -> EpochSample:
        """Sample of draw ``draw`` of the run."""
        epoch, offset = divmod(draw, self.draws)
        sample_index = offset % self._samples
        counts = offset < self._samples
        if self._lanes is not None:
            return EpochSample(self._lanes.sample(epoch * self._samples + sample_index), counts)
        if self._shuffle:
            sample_index = Permutation(self._samples, mix(self._seed, epoch, _TASK_ORDER))(sample_index)
        return EpochSample(sample_index, counts)
