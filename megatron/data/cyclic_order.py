"""Passes over the same samples, each shuffled by itself: ``--dataloader-type cyclic``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron.data.gpt_index import SampleOrder, Span
from megatron.data.permute import Permutation, mix
from megatron.data.sentence_order import SentenceOrder, Sentences

_PASS = 4
"""Tells these shuffles from others of the same seed."""


class _Passes:
    """The place of each draw in its pass.

    Args:
        samples: number of samples in a pass.
        seed: seed of the shuffles.
        num_samples: most samples that may be drawn; None is one pass.
    """

    def __init__(self, samples: int, seed: int, num_samples: int | None) -> None:
        self._samples = samples
        self._seed = seed
        self._num_samples = samples if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples if self._samples else 0

    def place(self, index: int) -> int:
        """The place of draw ``index``.

        Raises:
            IndexError: when the index is outside the order.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, inside = divmod(index, self._samples)
        return Permutation(self._samples, mix(self._seed, epoch, _PASS))(inside)


class CyclicOrder:
    """The samples of one epoch of GPT, in another order in each pass.

    The order of a pass follows from the seed and the number of the pass, whatever the length of the run.

    Args:
        epoch: an order of one epoch.
        seed: seed of the shuffles.
        num_samples: most samples that may be drawn; None is one pass.
    """

    def __init__(self, epoch: SampleOrder, seed: int, num_samples: int | None) -> None:
        self._epoch = epoch
        self._passes = _Passes(len(epoch), seed, num_samples)

    @property
    def epoch_samples(self) -> int:
        """See ``SampleOrder``."""
        return len(self._epoch)

    def __len__(self) -> int:
        return len(self._passes)

    def sample_id(self, index: int) -> int:
        """See ``SampleOrder``.

        Raises:
            IndexError: when the index is outside the order.
        """
        return self._epoch.sample_id(self._passes.place(index))

    def spans(self, sample_id: int) -> Iterator[Span]:
        """See ``SampleOrder``."""
        return self._epoch.spans(sample_id)


class CyclicSentences:
    """The samples of one epoch of sentences, in another order and with other random numbers in each pass.

    Arguments as of ``CyclicOrder``.
    """

    lanes: int | None = None

    def __init__(self, epoch: SentenceOrder, seed: int, num_samples: int | None) -> None:
        self._epoch = epoch
        self._passes = _Passes(len(epoch), seed, num_samples)

    @property
    def epoch_samples(self) -> int:
        """See ``SentenceOrder``."""
        return len(self._epoch)

    def __len__(self) -> int:
        return len(self._passes)

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
        return self._epoch.sentences(self._epoch.sample_id(self._passes.place(sample_id)))

    def random(self, sample_id: int) -> np.random.RandomState:
        """See ``SentenceOrder``."""
        return self._epoch.random(sample_id)
