"""EDGC: entropy, the two rules, windows and the controller."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.compression.api import Op, Reduced, Request, Trial
from megatron.compression.edgc import EDGCConfig, RankByEntropy, RankController, differential_entropy, residual_shares
from megatron.compression.plugins import build_registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.compression.stage_times import StageTimes


def test_the_entropy_of_a_gaussian_follows_its_size() -> None:
    """H = ln(2 pi e sigma^2) / 2. The published histogram gives the same entropy for every sigma."""
    for sigma in (1e-4, 1.0, 30.0):
        x = sigma * torch.randn(400_000, generator=torch.Generator().manual_seed(0))
        assert differential_entropy(x) == pytest.approx(0.5 * math.log(2 * math.pi * math.e * sigma**2), abs=0.01)


def test_non_finite_numbers_do_not_count() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    spoiled = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    assert differential_entropy(spoiled) == differential_entropy(x)
    assert math.isnan(differential_entropy(torch.full((3,), torch.nan)))
    assert differential_entropy(torch.zeros(5)) == -math.inf


@pytest.mark.parametrize("shape", [(200, 200), (100, 400), (300, 60)])
def test_residual_shares_are_those_of_the_singular_values_of_noise(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    shares = residual_shares(*shape)
    assert len(shares) == min(shape) + 1
    for rank in range(0, min(shape), 13):
        measured = float(values[rank:].square().sum().sqrt() / values.norm())
        assert float(shares[rank]) == pytest.approx(measured, abs=0.03)


def _windows(rule: RankByEntropy, entropies: list[float]) -> list[int]:
    ranks = []
    for entropy in entropies:
        for _ in range(3):
            rule.add_entropy(entropy)
        rule.add_entropy(math.nan)
        ranks.append(rule.close_window())
    return ranks


def test_the_linear_rule() -> None:
    """min + (max - min) change / first change, even, at most 4 at a time, from the third window on."""
    rule = RankByEntropy(EDGCConfig(rank=64, min_rank=16), (512, 512))
    assert _windows(rule, [5.0, 4.0, 3.5, 3.5, 3.5, 3.5]) == [64, 64, 60, 56, 52, 48]
    quick = RankByEntropy(EDGCConfig(rank=64, min_rank=16, max_step=100), (512, 512))
    assert _windows(quick, [5.0, 4.0, 3.5, 3.25, 3.25, 9.0]) == [64, 64, 40, 28, 16, 64]


def test_a_window_without_a_measurement_keeps_the_rank() -> None:
    rule = RankByEntropy(EDGCConfig(rank=64, min_rank=16), (512, 512))
    assert _windows(rule, [5.0, 4.0, 3.5]) == [64, 64, 60]
    rule.add_entropy(math.nan)
    assert rule.close_window() == 60
    assert rule.close_window() == 60
    assert _windows(rule, [3.5]) == [56]


def test_the_rank_waits_for_the_end_of_the_dense_warm_up() -> None:
    """Windows are measured from the start, but the first compressed step has the greatest rank."""
    rule = RankByEntropy(EDGCConfig(rank=64, min_rank=16), (512, 512))
    for entropy in (5.0, 4.0, 3.5, 3.4, 3.35):
        rule.add_entropy(entropy)
        assert rule.close_window(moves=False) == 64
    assert _windows(rule, [3.3]) == [60]


def test_equal_first_entropies_keep_the_greatest_rank() -> None:
    """The published code divides by the first change, zero here."""
    rule = RankByEntropy(EDGCConfig(rank=32), (512, 512))
    assert _windows(rule, [2.0, 2.0, 2.0, 1.0]) == [32, 32, 32, 32]


def test_the_formula_keeps_the_error() -> None:
    shape = (256, 512)
    rule = RankByEntropy(EDGCConfig(rank=64, min_rank=2, rule="formula", max_step=100), shape)
    shares = residual_shares(*shape)
    fall = 0.15
    rank = _windows(rule, [3.0, 3.0, 3.0 - fall])[-1]
    assert 2 < rank < 64
    assert float(shares[rank]) * math.exp(-fall) == pytest.approx(float(shares[64]), rel=0.03)
    assert _windows(rule, [3.5])[-1] == 64


def test_the_state_of_a_rule_goes_through_json() -> None:
    config = EDGCConfig(rank=64, max_step=100)
    rule, restored = RankByEntropy(config, (64, 64)), RankByEntropy(config, (64, 64))
    _windows(rule, [5.0, 4.0, 3.6])
    rule.add_entropy(3.3)
    restored.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert rule.close_window() == restored.close_window()
    assert rule.state_dict() == restored.state_dict()


@pytest.mark.parametrize(
    "changes",
    [
        {"means": "abc"},
        {"means": [None]},
        {"means": [float("nan")]},
        {"rank": float("inf")},
        {"count": -1},
        {"sum": []},
    ],
)
def test_an_invalid_state_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    rule = RankByEntropy(EDGCConfig(rank=64, max_step=100), (64, 64))
    _windows(rule, [5.0, 4.0, 3.6])
    before = rule.state_dict()
    with pytest.raises((TypeError, ValueError, OverflowError)):
        rule.load_state_dict({**before, **changes})
    assert rule.state_dict() == before


TIMES = asdict(StageTimes([2, 4, 8], [9.0, 9.0], [[2.0, 4.0, 8.0], [2.0, 4.0, 8.0]], [0.0, 3.0]))
OLD = {"rank": 4.0, "means": [3.0, 2.5], "sum": 0.0, "count": 0.0}
"""State saved by a version without a probe."""


def test_the_state_of_a_version_without_a_probe_loads() -> None:
    """The probe comes later; compression is on, unless it waits for the error."""
    controller = RankController(EDGCConfig(rank=8, min_rank=2))
    controller.load_state_dict(OLD)
    assert [controller.options(stage) for stage in range(2)] == [{"rank": 4}, {"rank": 4}]
    assert [iteration for iteration in range(25) if controller.needs_wait_times(iteration)] == [7, 8, 9, 17, 18, 19]
    waits = RankController(EDGCConfig(rank=8, min_rank=2, warmup_ends="error"))
    waits.load_state_dict(OLD)
    assert waits.options(0) is None


def test_the_state_of_a_controller_goes_through_json() -> None:
    config = EDGCConfig(rank=8, min_rank=2, warmup_ends="error")
    state = {**OLD, "times": TIMES, "warm": True, "measured": {"entropy": -3.5, "first_error": 0.5}}
    controller = RankController(config)
    controller.load_state_dict(json.loads(json.dumps(state)))
    assert controller.state_dict() == state
    assert [controller.options(stage) for stage in range(2)] == [{"rank": 4}, {"rank": 7}]
    assert not controller.needs_wait_times(9)
    assert controller.figures([0, 1]) == {
        "entropy": -3.5,
        "first_error": 0.5,
        "rank": 4.0,
        "rank_of_stage_0": 4.0,
        "seconds_of_stage_0": 4.0,
        "exact_seconds_of_stage_0": 9.0,
        "head_start_of_stage_0": 0.0,
        "rank_of_stage_1": 7.0,
        "seconds_of_stage_1": 7.0,
        "exact_seconds_of_stage_1": 9.0,
        "head_start_of_stage_1": 3.0,
    }
    controller.on_layout_change()
    assert controller.needs_wait_times(9)
    assert controller.options(1) == {"rank": 4}


def test_stage_slack_replaces_measured_times() -> None:
    controller = RankController(EDGCConfig(rank=8, min_rank=2, stage_slack=0.5))
    controller.load_state_dict({**OLD, "times": TIMES, "warm": True, "measured": {}})
    assert not any(controller.needs_wait_times(iteration) for iteration in range(30))
    assert [controller.options(stage) for stage in range(4)] == [{"rank": rank} for rank in (4, 6, 8, 8)]


@pytest.mark.parametrize(
    "changes",
    [{"times": [1]}, {"times": {}}, {"measured": {"entropy": float("nan")}}, {"measured": [1.0]}, {"rank": "x"}],
)
def test_an_invalid_state_of_a_controller_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    controller = RankController(EDGCConfig(rank=8, min_rank=2))
    controller.load_state_dict({**OLD, "times": TIMES, "warm": True, "measured": {"entropy": 1.0}})
    before = controller.state_dict()
    with pytest.raises((TypeError, ValueError, LookupError)):
        controller.load_state_dict({**before, **changes})
    assert controller.state_dict() == before


def _trials(controller: RankController, iteration: int) -> list[Trial]:
    """Trials that a controller asks for in a step of a single process."""
    generator = controller.after_reduction(Reduced(iteration, [torch.ones(6)], [(2, 3)], 1.0, True, 0))
    tried: list[Trial] = []
    with contextlib.suppress(StopIteration):
        request = next(generator)
        while True:
            if isinstance(request, Trial):
                tried.append(request)
                request = generator.send(torch.ones(3, dtype=torch.float64))
            else:
                assert isinstance(request, Request)
                request = generator.send(request.tensor[None] if request.op is Op.GATHER else request.tensor)
    return tried


@pytest.mark.parametrize("first", [0, 7, 8, 9, 10])
def test_times_are_measured_in_the_third_meeting_of_a_process(first: int) -> None:
    """A new process compiles, connects and loads in its first steps."""
    controller = RankController(EDGCConfig(rank=8, min_rank=2))
    tried = [iteration for iteration in range(first, 25) if _trials(controller, iteration)]
    assert tried == [9 if first <= 7 else 19]


def test_a_rank_above_all_tried_ranks_is_measured_again() -> None:
    state = {**OLD, "times": TIMES, "warm": True, "measured": {}}
    for rank, keeps_times in ((4, True), (8, True), (16, False)):
        controller = RankController(EDGCConfig(rank=rank, min_rank=2))
        controller.load_state_dict(state)
        assert (controller.times is not None) is keeps_times
        assert controller.needs_wait_times(9) is not keeps_times


def test_a_warm_up_that_ends_by_error_needs_the_first_stage() -> None:
    registry, length = build_registry([]), RunLength(10)
    for stages in ("stages=first:1,warmup-ends=error", "stages=last:1"):
        read_specs([f"dp-grad=edgc,{stages}"], registry, length)
    with pytest.raises(UserError, match=r"warmup-ends=error: .*first stage.*stages=last"):
        read_specs(["dp-grad=edgc,warmup-ends=error,stages=last:1"], registry, length)
