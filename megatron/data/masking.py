"""Which words of a text are masked: n-grams of whole words, as in megatron-core.

Given the same numbers of a ``numpy.random.RandomState``, the n-grams are megatron-core's, one by one, and the state has
moved on by the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Of a geometric distribution of the words in an n-gram, as in SpanBERT.
_GEOMETRIC_P = 0.2


@dataclass(frozen=True)
class WordMasking:
    """How words are chosen.

    Args:
        probability: share of the tokens that is masked.
        longest_ngram: most words that are masked together.
        geometric: the number of words is drawn from a clipped geometric distribution; else n words are drawn with a
            probability in proportion to 1 / n.
    """

    probability: float
    longest_ngram: int
    geometric: bool


BERT_MASKING_NGRAM = 3
T5_MASKING_NGRAM = 10


class WordMasker:
    """A chooser of n-grams of words.

    Args:
        masking: how they are chosen.
        continues_v: bool, for every token id: whether it continues a word (##...).
        never: ids that are no part of a word, such as [CLS] and [SEP].
    """

    def __init__(self, masking: WordMasking, continues_v: NDArray[np.bool_], never: tuple[int, ...]) -> None:
        self._masking = masking
        self._continues_v = continues_v
        self._never = never
        shares = 1.0 / np.arange(1, masking.longest_ngram + 1)
        shares = shares / shares.sum(keepdims=True)
        shares = shares / shares.sum(keepdims=True)
        running = shares.cumsum()
        self._running: list[float] = (running / running[-1]).tolist()

    def ngrams(
        self, tokens_t: NDArray[np.int64], target: int, random: np.random.RandomState
    ) -> Iterator[NDArray[np.int64]]:
        """Draws n-grams that do not overlap, in any order, until the share of masked tokens is reached.

        Args:
            tokens_t: the text, special tokens included.
            target: the most tokens that the text was to have.
            random: the random numbers; the caller may draw from them between two n-grams.

        Yields:
            The places of an n-gram's tokens, ascending.
        """
        places, bounds = self._words(tokens_t)
        words = len(bounds) - 1
        share = self._masking.probability
        wanted = min(share * target, max(1, round(len(tokens_t) * share)))
        order = np.arange(words)
        random.shuffle(order)
        taken = bytearray(len(places))
        count = 0
        for word in order.tolist():
            if count >= wanted:
                break
            # Fewer words where that many would be too many tokens.
            low, size = bounds[word], self._ngram_size(random)
            while size and count + bounds[min(word + size, words)] - low > wanted:
                size -= 1
            high = bounds[min(word + size, words)]
            if not size or 1 in taken[low:high]:
                continue
            taken[low:high] = b"\1" * (high - low)
            count += high - low
            yield places[low:high]

    def _words(self, tokens_t: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
        """The places of all tokens of words, and where in them each word begins; the last entry is their number.

        A piece of a word whose beginning was cut off belongs to the word before it, as in megatron-core.
        """
        places = np.flatnonzero(~np.isin(tokens_t, self._never))
        begins = ~self._continues_v[tokens_t[places]]
        begins[:1] = True
        return places, [*np.flatnonzero(begins).tolist(), len(places)]

    def _ngram_size(self, random: np.random.RandomState) -> int:
        longest = self._masking.longest_ngram
        if self._masking.geometric:
            return min(int(random.geometric(_GEOMETRIC_P)), longest)
        return bisect_right(self._running, random.random_sample()) + 1
