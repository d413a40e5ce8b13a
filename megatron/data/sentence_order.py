"""Sample orders of BERT and T5: map a draw to its sentences and its random generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import cached_arrays
from megatron.data.fixed_order import Lanes
from megatron.data.mersenne import mersenne_64, shuffle_range
from megatron.data.permute import Permutation, check_index, mix, random_state
from megatron.data.sentences import Cut, SentenceDocuments, cut_at_once, cut_in_order


class Sentences(NamedTuple):
    """Consecutive sentences [begin, end) of a file, and their target length in tokens."""

    begin: int
    end: int
    target: int


class SentenceOrder(Protocol):
    """Interface of a sentence order."""

    @property
    def epoch_samples(self) -> int:
        """Number of samples in a pass over all sentences."""

    @property
    def lanes(self) -> int | None:
        """See ``SampleSource``."""

    def __len__(self) -> int:
        """Number of samples that can be drawn."""

    def sample_id(self, index: int) -> int:
        """Id of the sample at draw ``index``; it determines the sentences and the random numbers."""

    def sentences(self, sample_id: int) -> Sentences:
        """Sentences of a sample."""

    def random(self, sample_id: int) -> np.random.RandomState:
        """Random generator of a sample."""


class LazySentences:
    """The default order: documents are cut once; every epoch reshuffles the samples and draws new random numbers.

    Draws take constant time and do not depend on the length of the run.

    Args:
        documents, cut: documents to draw from, and the parameters of the cut.
        seed: seed of the cut, the shuffles and the random numbers of samples.
        num_samples: maximum number of draws; None is an epoch.
    """

    lanes: int | None = None

    def __init__(self, documents: SentenceDocuments, cut: Cut, seed: int, num_samples: int | None) -> None:
        self._rows = cut_at_once(documents, cut, mix(seed, 0))
        self._seed = seed
        self.epoch_samples = len(self._rows)
        self._num_samples = self.epoch_samples if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples

    def sample_id(self, index: int) -> int:
        """See ``SentenceOrder``: masks are redrawn in each epoch, so every draw is a distinct sample.

        Raises:
            IndexError: when the index is outside the order.
        """
        return check_index(index, self._num_samples)

    def sentences(self, sample_id: int) -> Sentences:
        epoch, position = divmod(sample_id, len(self._rows))
        row = self._rows[Permutation(len(self._rows), mix(self._seed, epoch, 1))(position)]
        return Sentences(*row.tolist())

    def random(self, sample_id: int) -> np.random.RandomState:
        return random_state(self._seed, sample_id, 2)


class FixedSentences(LazySentences):
    """The same samples in every epoch, masks included, in the order of ``Lanes``. Arguments as in ``LazySentences``."""

    def __init__(self, documents: SentenceDocuments, cut: Cut, seed: int, num_samples: int) -> None:
        super().__init__(documents, cut, seed, num_samples)
        self._lanes = Lanes(len(self._rows), seed)
        self.lanes = self._lanes.lanes
        self.epoch_samples = self._lanes.epoch_samples

    def sample_id(self, index: int) -> int:
        return self._lanes.sample(check_index(index, self._num_samples))

    def sentences(self, sample_id: int) -> Sentences:
        return Sentences(*self._rows[sample_id].tolist())


class MegatronSentences:
    """megatron-core's order: samples of complete epochs, shuffled together; built at startup or read from the cache.

    Args:
        documents, cut, seed: the arguments of ``LazySentences``; the seed is used unchanged.
        num_samples: minimum number of samples; None is an epoch. All samples of the last epoch can be drawn.
        cache_path: cache folder for the arrays.
        cache_identity: path, size and modification time of the documents' file, for the cache.
    """

    lanes: int | None = None

    def __init__(
        self,
        documents: SentenceDocuments,
        cut: Cut,
        seed: int,
        num_samples: int | None,
        cache_path: str | Path | None = None,
        cache_identity: dict[str, Any] | None = None,
    ) -> None:
        identity = {
            **(cache_identity or {}),
            "documents": [int(documents.starts_d[0]), int(documents.starts_d[-1]), len(documents.starts_d)],
            "cut": list(vars(cut).values()),
            "seed": seed,
            "num_samples": num_samples,
        }
        arrays = cached_arrays(
            cache_path, "sentence-order", identity, lambda: build_megatron_sentences(documents, cut, seed, num_samples)
        )
        self.rows, self.shuffle_index = arrays["rows"], arrays["shuffle_index"]
        self._seed = seed
        # Of the first epoch; other epochs differ in their short samples.
        self.epoch_samples = int(arrays["epoch_samples"])

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def sample_id(self, index: int) -> int:
        """See ``SentenceOrder``: the index determines the random numbers.

        Raises:
            IndexError: when the index is outside the order.
        """
        return check_index(index, len(self))

    def sentences(self, sample_id: int) -> Sentences:
        return Sentences(*self.rows[self.shuffle_index[sample_id]].tolist())

    def random(self, sample_id: int) -> np.random.RandomState:
        return np.random.RandomState((self._seed + sample_id) % (1 << 32))


def build_megatron_sentences(
    documents: SentenceDocuments, cut: Cut, seed: int, num_samples: int | None
) -> dict[str, NDArray[Any]]:
    """Build the arrays of ``MegatronSentences``.

    Returns:
        rows: uint32 or int64 [samples, 3], as returned by ``cut_in_order``.
        shuffle_index: uint32 or int64 [samples].
        epoch_samples: int64 [], samples of the first epoch.
    """
    rows = cut_in_order(documents, cut, seed, num_samples)
    # A new epoch starts where the sentence index drops.
    epoch_ends = np.flatnonzero(rows[1:, 0] <= rows[:-1, 0])
    epoch_samples = int(epoch_ends[0]) + 1 if len(epoch_ends) else len(rows)
    shuffle_index = shuffle_range(len(rows), mersenne_64(seed + 1))
    return {"rows": rows, "shuffle_index": shuffle_index, "epoch_samples": np.array(epoch_samples, dtype=np.int64)}
