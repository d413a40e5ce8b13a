"""N-grams: entire words, disjoint, without special tokens, and as many as requested."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.masking import WordMasker, WordMasking

CLS, SEP, WORDS, PIECES = 0, 1, range(2, 12), range(12, 20)
CONTINUES_V = np.arange(20) >= PIECES[0]
TEXTS = st.lists(st.integers(CLS, PIECES[-1]), min_size=1, max_size=80)
MASKINGS = st.builds(WordMasking, st.floats(0.01, 0.99), st.integers(1, 10), st.booleans())


def masker(masking: WordMasking) -> WordMasker:
    return WordMasker(masking, CONTINUES_V, (CLS, SEP))


def words_of(tokens: list[int]) -> list[list[int]]:
    """Positions of each word; a piece belongs to the word before it, even across special tokens."""
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if CONTINUES_V[token] and words:
            words[-1].append(position)
        else:
            words.append([position])
    return words


@settings(max_examples=300, deadline=None)
@given(tokens=TEXTS, masking=MASKINGS, seed=st.integers(0, 1 << 31))
def test_ngrams_are_whole_words_apart(tokens: list[int], masking: WordMasking, seed: int) -> None:
    target = len(tokens) + seed % 5
    random = np.random.RandomState(seed)
    ngrams = [ngram.tolist() for ngram in masker(masking).ngrams(np.array(tokens), target, random)]
    words = words_of(tokens)
    for ngram in ngrams:
        first = next(number for number, word in enumerate(words) if word[0] == ngram[0])
        count = 0
        while list(chain.from_iterable(words[first : first + count])) != ngram:
            count += 1
            assert count <= masking.longest_ngram
    masked = [position for ngram in ngrams for position in ngram]
    assert len(masked) == len(set(masked))
    assert not any(tokens[position] in (CLS, SEP) for position in masked)
    target_count = max(1, round(len(tokens) * masking.probability))
    exact_count = min(target_count, masking.probability * target)
    assert len(masked) <= exact_count
    if masking.longest_ngram == 1:  # longer n-grams are skipped where they meet others
        unmasked_sizes = [len(word) for word in words if word[0] not in masked]
        assert all(len(masked) + size > exact_count for size in unmasked_sizes)


def test_the_share_of_masked_tokens() -> None:
    tokens = np.random.RandomState(0).randint(WORDS[0], PIECES[-1] + 1, size=500)
    for masking in (WordMasking(0.15, 3, False), WordMasking(0.15, 10, True)):
        for seed in range(20):
            ngrams = masker(masking).ngrams(tokens, 512, np.random.RandomState(seed))
            assert 73 <= sum(map(len, ngrams)) <= 75


def test_the_sizes_of_ngrams() -> None:
    """Uniform sizes have odds 6:3:2; geometric sizes have a mean of 5, clipped."""
    tokens = np.tile(np.arange(WORDS[0], WORDS[-1] + 1), 40)
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for geometric, longest in ((False, 3), (True, 10)):
        chooser = masker(WordMasking(0.01, longest, geometric))
        for seed in range(1500):
            # Only the first n-gram: later n-grams must fit.
            sizes[geometric].append(len(next(chooser.ngrams(tokens, 4000, np.random.RandomState(seed)))))
    counts = np.bincount(sizes[False], minlength=4)[1:] / 1500
    assert np.abs(counts - np.array([6, 3, 2]) / 11).max() < 0.05
    expected = [0.8 ** (n - 1) * 0.2 for n in range(1, 4)]
    assert np.abs(np.bincount(sizes[True], minlength=5)[1:4] / 1500 - expected).max() < 0.05
