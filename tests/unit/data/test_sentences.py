"""Documents of sentences cut into samples, compared with the rule applied sentence by sentence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.data.mersenne import mersenne_32
from megatron.data.sentences import Cut, SentenceDocuments, cut_at_once, cut_in_order

LENGTHS = st.lists(st.lists(st.integers(0, 20) | st.just(600), max_size=12), min_size=1, max_size=12)
CUTS = st.builds(Cut, st.integers(2, 60), st.sampled_from([1, 2]), st.sampled_from([0.0, 0.1, 0.5, 1.0]))


def sentence_documents(lengths: list[list[int]], before: int = 3) -> SentenceDocuments:
    """Documents whose first sentence has number ``before`` in its file."""
    flat = [9] * before + list(chain.from_iterable(lengths)) + [9]
    starts = before + np.concatenate([[0], np.cumsum([len(document_lengths) for document_lengths in lengths])])
    return SentenceDocuments(np.array(flat, dtype=np.int32), starts.astype(np.int64), "file (train)")


def plainly(documents: SentenceDocuments, cut: Cut, target: Callable[[int], int]) -> list[list[int]]:
    """Samples of an epoch by the rule; ``target`` is called at the start of a document and after each sample."""
    rows = []
    for first, last in zip(documents.starts_d[:-1].tolist(), documents.starts_d[1:].tolist(), strict=True):
        sentences = documents.lengths_s[first:last].tolist()
        if len(sentences) < cut.min_sentences or (len(sentences) > 1 and max(sentences) > 512):
            continue
        begin, tokens, target_tokens = first, 0, target(first)
        for sentence in range(first, last):
            tokens += int(documents.lengths_s[sentence])
            remaining, count = last - sentence - 1, sentence + 1 - begin
            if (tokens >= target_tokens and remaining > 1 and count >= cut.min_sentences) or remaining == 0:
                rows.append([begin, sentence + 1, target_tokens])
                begin, tokens, target_tokens = sentence + 1, 0, target(sentence + 1)
    return rows


def megatron_targets(cut: Cut, seed: int) -> Callable[[int], int]:
    numbers = chain.from_iterable(mersenne_32(seed))
    ratio = round(1 / cut.short_probability) if cut.short_probability else 0

    def target(begin: int) -> int:
        if not ratio:
            return cut.max_tokens
        number = int(next(numbers))
        return cut.max_tokens if number % ratio else 2 + number % (cut.max_tokens - 1)

    return target


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, cut=CUTS, num_samples=st.none() | st.integers(1, 40))
def test_cut_in_order_follows_the_rule(lengths: list[list[int]], cut: Cut, num_samples: int | None) -> None:
    documents = sentence_documents(lengths)
    target = megatron_targets(cut, 5)
    expected = plainly(documents, cut, target)
    if not expected:
        with pytest.raises(UserError, match="split-sentences"):
            cut_in_order(documents, cut, 5, num_samples)
        return
    while num_samples is not None and len(expected) < num_samples:
        expected += plainly(documents, cut, target)
    assert cut_in_order(documents, cut, 5, num_samples).tolist() == expected


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, cut=CUTS)
def test_cut_at_once_follows_the_rule_with_positional_targets(lengths: list[list[int]], cut: Cut) -> None:
    documents = sentence_documents(lengths)
    try:
        rows = cut_at_once(documents, cut, 7).tolist()
    except UserError:
        rows = []
    targets = {row[0]: row[2] for row in rows}
    assert rows == plainly(documents, cut, lambda begin: targets.get(begin, 0))
    assert all(2 <= target <= cut.max_tokens for target in targets.values())
    if not cut.short_probability:
        assert set(targets.values()) <= {cut.max_tokens}


def test_targets_are_short_with_the_given_probability() -> None:
    documents = sentence_documents([[5] * 20_000])
    for probability in (0.1, 0.5, 1.0):
        cut = Cut(50, 1, probability)
        targets = cut_at_once(documents, cut, 3)[:, 2]
        # A short sample is drawn with all targets from 2 on alike, the longest among them.
        assert abs((targets < 50).mean() - probability * 48 / 49) < 0.03
        assert {2, 49, 50} <= set(targets.tolist())
        assert not np.array_equal(targets[:100], cut_at_once(documents, cut, 4)[:100, 2])


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(0)
    documents = sentence_documents([random.randint(1, 20, size=random.randint(0, 9)).tolist() for _ in range(200)])
    cut = Cut(30, 2, 0.1)
    expected = cut_in_order(documents, cut, 1, 500), cut_at_once(documents, cut, 1)
    monkeypatch.setattr("megatron.data.sentences._CHUNK_SENTENCES", 16)
    chunks = cut_in_order(documents, cut, 1, 500), cut_at_once(documents, cut, 1)
    assert [rows.tolist() for rows in expected] == [rows.tolist() for rows in chunks]
