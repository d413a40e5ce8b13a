"""Whole-word n-gram masking, as in megatron-core.

From the same ``numpy.random.RandomState``, it draws the same n-grams as megatron-core and leaves the generator in the
same state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Parameter of the geometric distribution of n-gram lengths in words, as in SpanBERT.
_GEOMETRIC_P = 0.2


@dataclass(frozen=True)
class WordMasking:
    """Masking parameters.

    Args:
        probability: fraction of tokens to mask.
        longest_ngram: maximum n-gram length in words.
        geometric: draw the n-gram length from a clipped geometric distribution; otherwise, length n has probability
            proportional to 1 / n.
    """

    probability: float
    longest_ngram: int
    geometric: bool


BERT_MASKING_NGRAM = 3
T5_MASKING_NGRAM = 10


class WordMasker:
    """Selects n-grams of words to mask.

    Args:
        masking: masking parameters.
        continues_v: bool, for every token id: whether it continues a word (##...).
        never_masked: ids that are never masked, such as [CLS] and [SEP].
    """

    def __init__(self, masking: WordMasking, continues_v: NDArray[np.bool_], never_masked: tuple[int, ...]) -> None:
        self._masking = masking
        self._continues_v = continues_v
        self._never_masked = never_masked
        shares = 1.0 / np.arange(1, masking.longest_ngram + 1)
        # Normalized twice, which reproduces the rounding of megatron-core.
        shares = shares / shares.sum(keepdims=True)
        shares = shares / shares.sum(keepdims=True)
        cumulative_shares = shares.cumsum()
        self._cumulative_shares: list[float] = (cumulative_shares / cumulative_shares[-1]).tolist()

    def ngrams(
        self, tokens_t: NDArray[np.int64], target: int, random: np.random.RandomState
    ) -> Iterator[NDArray[np.int64]]:
        """Draw non-overlapping n-grams, in random order, until the masking fraction is reached.

        Args:
            tokens_t: the text, special tokens included.
            target: target length of the text, in tokens.
            random: random generator; the caller may draw from it between n-grams.

        Yields:
            Token positions of an n-gram, ascending.
        """
        positions = np.flatnonzero(~np.isin(tokens_t, self._never_masked))
        # A piece of a truncated word belongs to the preceding word, as in megatron-core.
        begins = ~self._continues_v[tokens_t[positions]]
        begins[:1] = True
        bounds = [*np.flatnonzero(begins).tolist(), len(positions)]
        words = len(bounds) - 1
        share = self._masking.probability
        token_budget = min(share * target, max(1, round(len(tokens_t) * share)))
        order = np.arange(words)
        random.shuffle(order)
        masked_flags = bytearray(len(positions))
        count = 0
        for word in order.tolist():
            if count >= token_budget:
                break
            low = bounds[word]
            if self._masking.geometric:
                size = min(int(random.geometric(_GEOMETRIC_P)), self._masking.longest_ngram)
            else:
                size = bisect_right(self._cumulative_shares, random.random_sample()) + 1
            # Shorten the n-gram if it would exceed the token budget.
            while size and count + bounds[min(word + size, words)] - low > token_budget:
                size -= 1
            high = bounds[min(word + size, words)]
            if not size or 1 in masked_flags[low:high]:
                continue
            masked_flags[low:high] = b"\1" * (high - low)
            count += high - low
            yield positions[low:high]
