"""Blends: shares at every prefix, each sample once, and the parallel greedy blend against the serial one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.blend import LazyBlend, MegatronBlend, greedy_blend, normalize

WEIGHTS = st.lists(st.floats(0.001, 100), min_size=1, max_size=9)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, draws=st.integers(0, 400))
def test_lazy_blend_keeps_its_shares_at_every_prefix(weights: list[float], draws: int) -> None:
    blend = LazyBlend(weights, draws)
    shares = np.array(weights) / sum(weights)
    counts = [0] * len(weights)
    bound = math.ceil(math.log2(len(weights))) / 2
    for k in range(draws):
        dataset, number = blend[k]
        assert number == counts[dataset]
        counts[dataset] += 1
        assert np.abs(np.array(counts) - shares * (k + 1)).max() <= bound + 1e-6
    assert counts == blend.counts()
    with pytest.raises(IndexError):
        blend[draws]


def test_lazy_blend_does_not_drift_after_many_draws() -> None:
    blend = LazyBlend([0.1, 0.2, 0.7], 10**15)
    dataset, number = blend[10**15 - 1]
    assert abs(number - [1e14, 2e14, 7e14][dataset]) <= 2
    assert sum(blend.counts()) == 10**15


@settings(max_examples=25, deadline=None)
@given(weights=WEIGHTS, draws=st.integers(0, 3000), stretches=st.integers(1, 40))
def test_parallel_greedy_blend_equals_the_serial_blend(weights: list[float], draws: int, stretches: int) -> None:
    shares = normalize(weights)
    plain, cut = greedy_blend(shares, draws), greedy_blend(shares, draws, stretches)
    for name in ("dataset_index", "dataset_sample_index"):
        assert plain[name].dtype == cut[name].dtype
        assert plain[name].tolist() == cut[name].tolist()


def test_parallel_greedy_blend_repairs_wrong_guesses() -> None:
    """With shares this small a stretch cannot know whether their draw has come: it is run again."""
    shares = normalize([1.0, 1e-4, 3e-4, 0.5])
    plain, cut = greedy_blend(shares, 20_000), greedy_blend(shares, 20_000, 333)
    assert plain["dataset_index"].tolist() == cut["dataset_index"].tolist()


def test_megatron_blend_numbers_the_draws_of_each_dataset() -> None:
    blend = MegatronBlend([3.0, 1.0, 1.0], 500)
    counts = [0, 0, 0]
    for k in range(500):
        dataset, number = blend[k]
        assert number == counts[dataset]
        counts[dataset] += 1
    assert counts == [300, 100, 100]
