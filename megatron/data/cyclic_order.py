"""Passes over the same samples, each shuffled by itself: ``--dataloader-type cyclic``."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Generic, TypeVar

import numpy as np

from megatron.data.gpt_index import SampleOrder, Span
from megatron.data.permute import Permutation, mix
from megatron.data.sentence_order import SentenceOrder, Sentences

Epoch = TypeVar("Epoch", bound=Sized)

_PASS = 4
"""Tells these shuffles from others of the same seed."""


class _Passes(Generic[Epoch]):
    """The samples of one epoch, in another order in each pass.

    The order of a pass follows from the seed and the number of the pass, whatever the length of the run.

    Args:
        epoch: an order of one epoch.
        seed: seed of the shuffles.
        num_samples: most samples that may be drawn; None is one pass.
    """

    def __init__(self, epoch: Epoch, seed: int, num_samples: int | None) -> None:
        self._epoch = epoch
        self._seed = seed
        self._num_samples = len(epoch) if num_samples is None else num_samples

    @property
    def epoch_samples(self) -> int:
        """Samples of a pass."""
        return len(self._epoch)

    def __len__(self) -> int:
        return self._num_samples if self.epoch_samples else 0

    def _place(self, index: int) -> int:
        """The place of a draw in its pass.

        Raises:
            IndexError: when the index is outside the order.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, inside = divmod(index, self.epoch_samples)
        return Permutation(self.epoch_samples, mix(self._seed, number, _PASS))(inside)


class CyclicOrder(_Passes[SampleOrder]):
    """A ``SampleOrder`` of passes."""

    def sample_id(self, index: int) -> int:
        """See ``SampleOrder``.

        Raises:
            IndexError: when the index is outside the order.
        """
        return self._epoch.sample_id(self._place(index))

    def spans(self, sample_id: int) -> Iterator[Span]:
        """See ``SampleOrder``."""
        return self._epoch.spans(sample_id)


class CyclicSentences(_Passes[SentenceOrder]):
    """A ``SentenceOrder`` of passes, each with other random numbers."""

    lanes: int | None = None

    def sample_id(self, index: int) -> int:
        """See ``SentenceOrder``: masks are drawn anew in each pass, so every draw is a sample of its own.

        Raises:
            IndexError: when the index is outside the order.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return index

    def sentences(self, sample_id: int) -> Sentences:
        """See ``SentenceOrder``."""
        return self._epoch.sentences(self._epoch.sample_id(self._place(sample_id)))

    def random(self, sample_id: int) -> np.random.RandomState:
        """See ``SentenceOrder``."""
        return self._epoch.random(sample_id)
