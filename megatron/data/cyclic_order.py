"""Repeated passes over the same samples, reshuffled in each pass: ``--dataloader-type cyclic``."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Generic, TypeVar

import numpy as np

from megatron.data.gpt_index import SampleOrder, Span
from megatron.data.permute import Permutation, check_index, mix
from megatron.data.sentence_order import SentenceOrder, Sentences

Epoch = TypeVar("Epoch", bound=Sized)

_STREAM = 4
"""Stream id that separates these shuffles from others with the same seed."""


class _Passes(Generic[Epoch]):
    """Passes over the samples of an epoch, in a different order in each pass.

    The order of a pass depends only on the seed and the pass number, not on ``num_samples``, the maximum number of
    draws (None: a single pass).
    """

    def __init__(self, epoch: Epoch, seed: int, num_samples: int | None) -> None:
        self._epoch = epoch
        self._seed = seed
        self.epoch_samples = len(epoch)
        self._num_samples = self.epoch_samples if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples if self.epoch_samples else 0

    def _sample_index(self, index: int) -> int:
        """Index of a draw's sample within the epoch."""
        number, offset = divmod(check_index(index, len(self)), self.epoch_samples)
        return Permutation(self.epoch_samples, mix(self._seed, number, _STREAM))(offset)


class CyclicOrder(_Passes[SampleOrder]):
    """A ``SampleOrder`` of repeated passes."""

    def sample_id(self, index: int) -> int:
        return self._epoch.sample_id(self._sample_index(index))

    def spans(self, sample_id: int) -> Iterator[Span]:
        return self._epoch.spans(sample_id)


class CyclicSentences(_Passes[SentenceOrder]):
    """A ``SentenceOrder`` of repeated passes, with new random numbers in each pass."""

    lanes: int | None = None

    def sample_id(self, index: int) -> int:
        """See ``SentenceOrder``: masks are redrawn in each pass, so every draw is a distinct sample.

        Raises:
            IndexError: when the index is outside the order.
        """
        return check_index(index, len(self))

    def sentences(self, sample_id: int) -> Sentences:
        return self._epoch.sentences(self._epoch.sample_id(self._sample_index(sample_id)))

    def random(self, sample_id: int) -> np.random.RandomState:
        return self._epoch.random(sample_id)
