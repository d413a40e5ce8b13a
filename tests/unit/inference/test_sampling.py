"""Choosing tokens, against direct computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron.base.errors import UserError
from megatron.inference.sampling import Sampling, TokenCounts


def test_top_k_keeps_the_likeliest_and_their_ratios() -> None:
    logits = torch.randn(5, 40)
    p = Sampling(top_k=7, temperature=0.5).probabilities(logits)
    full = (logits / 0.5).softmax(-1)
    for row, reference in zip(p, full, strict=True):
        ids = set(reference.topk(7).indices.tolist())
        assert set(row.nonzero().flatten().tolist()) == ids
        indices = torch.tensor(sorted(ids))
        assert torch.allclose(row[indices], reference[indices] / reference[indices].sum())


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float) -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0)) * 3
    p = Sampling(top_p=top_p).probabilities(logits)
    for row, reference in zip(p, logits.softmax(-1), strict=True):
        order = reference.argsort(descending=True).tolist()
        total, ids = 0.0, []
        for token in order:
            if total >= top_p:
                break
            ids.append(token)
            total += float(reference[token])
        assert set(row.nonzero().flatten().tolist()) == set(ids)
        assert float(row.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("top_p", [1e-9, 1e-50, 5e-324])
def test_the_least_top_p_keeps_the_likeliest(top_p: float) -> None:
    logits = torch.randn(6, 30)
    p = Sampling(top_p=top_p).probabilities(logits)
    assert torch.equal(p.argmax(-1), logits.argmax(-1))
    assert torch.equal(p.sum(-1), torch.ones(6))


def test_top_p_of_one_keeps_all() -> None:
    logits = torch.randn(6, 30) * 3
    assert torch.equal(Sampling(top_p=1.0).probabilities(logits), logits.softmax(-1))


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(4, 50)
    assert torch.equal(Sampling(greedy=True).choose(logits, torch.rand(4)), logits.argmax(-1))


def test_token_frequencies_match_their_probabilities() -> None:
    sampling, logits = Sampling(top_k=5), torch.randn(1, 20, generator=torch.Generator().manual_seed(3))
    draws = torch.arange(10_000, dtype=torch.float64) / 10_000
    chosen = sampling.choose(logits.expand(10_000, -1), draws)
    frequencies = torch.bincount(chosen, minlength=20) / 10_000
    assert torch.allclose(frequencies, sampling.probabilities(logits)[0], atol=2e-4)
    assert sampling.choose(logits, torch.tensor([1 - 2**-53], dtype=torch.float64)) in logits.topk(5).indices


def test_top_p_decays_to_its_bound() -> None:
    sampling = Sampling(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    assert [sampling.after(n).top_p for n in range(4)] == pytest.approx([0.8, 0.4, 0.3, 0.3])
    assert Sampling(top_p=0.8).after(5).top_p == 0.8


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": 0.0}, "--temperature"),
        ({"top_k": -1}, "--top_k"),
        ({"top_p": 1.5}, "--top_p"),
        ({"min_p": 1.5}, "--min_p"),
        ({"repetition_penalty": 0.0}, "--repetition_penalty"),
        ({"greedy": True, "top_k": 5}, "--greedy"),
        ({"greedy": True, "min_p": 0.5}, "--greedy"),
        ({"top_p_decay": 0.5}, "--top_p"),
        ({"top_p": 0.5, "top_p_decay": 1.5}, "top_p_decay"),
    ],
)
def test_impossible_values_are_refused(values: dict, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        Sampling(**values)


PROCESSORS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"top_k": 5, "top_p": 0.6}, [TopKLogitsWarper(5), TopPLogitsWarper(0.6)]),
    ({"top_p": 0.9, "min_p": 0.3}, [TopPLogitsWarper(0.9), MinPLogitsWarper(0.3)]),
    ({"min_p": 0.1, "temperature": 0.6}, [TemperatureLogitsWarper(0.6), MinPLogitsWarper(0.1)]),
    ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
    ({"repetition_penalty": 1.8}, [RepetitionPenaltyLogitsProcessor(1.8)]),
    ({"repetition_penalty": 0.6, "top_k": 9}, [RepetitionPenaltyLogitsProcessor(0.6), TopKLogitsWarper(9)]),
    (
        {"logit_bias": [(3, 2.5), (11, -40.0)], "repetition_penalty": 1.3},
        [SequenceBiasLogitsProcessor([[[3], 2.5], [[11], -40.0]]), RepetitionPenaltyLogitsProcessor(1.3)],
    ),
]


@pytest.mark.parametrize(("options", "processors"), PROCESSORS, ids=[" ".join(options) for options, _ in PROCESSORS])
def test_probabilities_equal_transformers_processors(options: dict[str, Any], processors: list[Any]) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 30, generator=generator) * 3
    prompts = torch.randint(0, 30, (6, 4), generator=generator)
    continuations = torch.randint(0, 30, (6, 5), generator=generator)
    expected = logits
    for processor in processors:
        expected = processor(torch.cat([prompts, continuations], dim=1), expected)
    sampling = Sampling(**options)
    counts = TokenCounts(prompts.tolist(), 30, torch.device("cpu"))
    for tokens_b in continuations.T:
        counts.count_tokens(range(6), tokens_b)
    probabilities = sampling.probabilities(counts.adjust(sampling, logits, range(6)) if sampling.adjusts else logits)
    assert torch.allclose(probabilities, expected.softmax(-1), atol=1e-6)
    if sampling.adjusts:
        some = counts.adjust(sampling, logits[[4, 1]], [4, 1])
        assert torch.equal(sampling.probabilities(some), probabilities[[4, 1]])


def test_penalties_count_the_continuation_and_not_the_prompt() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    counts = TokenCounts([[1, 2]], 6, torch.device("cpu"))
    for token in (3, 4, 3, 3):
        counts.count_tokens([0], torch.tensor([token]))
    adjusted = counts.adjust(sampling, torch.ones(1, 6), [0])
    assert adjusted.tolist() == [[1, 1, 1, 1 - 0.5 - 0.75, 1 - 0.5 - 0.25, 1]]


def test_float64_logits_keep_their_precision() -> None:
    """Two tokens that only float64 tells apart, and penalties with fractions that need it."""
    logits = torch.tensor([[2.0, 2.0 + 1e-12, -1.0]], dtype=torch.float64)
    expected = (logits / 0.5).softmax(-1)
    probabilities = Sampling(temperature=0.5).probabilities(logits)
    assert probabilities.dtype == torch.float64
    assert torch.equal(probabilities, expected)
    assert Sampling(top_k=1).probabilities(logits).tolist() == [[0.0, 1.0, 0.0]]
    counts = TokenCounts([[2]], 3, logits.device)
    for _ in range(3):
        counts.count_tokens([0], torch.tensor([1]))
    sampling = Sampling(presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias=[(0, 0.1)])
    adjusted = counts.adjust(sampling, logits, [0])
    assert adjusted.dtype == torch.float64
    penalized = [2.1, (2.0 + 1e-12) / 1.1 - 3 * 0.1 - 0.1, -1.0 * 1.1]
    assert adjusted[0].tolist() == pytest.approx(penalized, abs=1e-14)
