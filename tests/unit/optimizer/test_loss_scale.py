"""Constant and dynamic loss scales."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.precision import PrecisionConfig
from megatron.optimizer.loss_scale import ConstantLossScale, DynamicLossScale, build_loss_scale


def run(scale: DynamicLossScale, verdicts: str) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` a clean step."""
    scales = []
    for verdict in verdicts:
        scale.update(verdict == "x")
        scales.append(scale.scale)
    return scales


def test_hysteresis_growth_and_minimum() -> None:
    """A single overflow is tolerated. Growth needs a window of clean steps, after which another overflow is."""
    assert run(DynamicLossScale(64.0, window=3, hysteresis=2), "xxx") == [64, 32, 16]
    scales = [64, 64, 64, 64, 64, 128, 128, 64]
    assert run(DynamicLossScale(64.0, window=3, hysteresis=2), "..x...xx") == scales
    assert run(DynamicLossScale(4.0, minimum=1.0, window=10, hysteresis=1), "xxxxx") == [2, 1, 1, 1, 1]


@given(st.text("x.", max_size=60), st.integers(1, 5))
def test_without_hysteresis_the_scale_is_that_of_torch(verdicts: str, window: int) -> None:
    ours = DynamicLossScale(2.0**16, minimum=1e-30, window=window, hysteresis=1)
    theirs, tracker = torch.full((1,), 2.0**16), torch.zeros(1, dtype=torch.int32)
    for verdict in verdicts:
        ours.update(verdict == "x")
        torch._amp_update_scale_(theirs, tracker, torch.tensor([float(verdict == "x")]), 2.0, 0.5, window)
        assert ours.scale == theirs.item()


@given(st.text("x.", max_size=60), st.text("x.", max_size=30))
def test_a_restored_scale_continues_like_the_original(before: str, after: str) -> None:
    original, restored = (DynamicLossScale(1024.0, window=4, hysteresis=2) for _ in range(2))
    run(original, before)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert run(original, after) == run(restored, after)


def test_states_of_another_kind_and_damaged_states() -> None:
    scale = DynamicLossScale(64.0, minimum=8.0, window=3, hysteresis=2)
    scale.load_state_dict(ConstantLossScale(2.0).state_dict())
    assert scale.scale == 8.0
    for damage in ({}, {"scale": "big"}, {"scale": float("nan")}, {"scale": 0}):
        with pytest.raises(UserError, match="--no-load-optim"):
            scale.load_state_dict(damage)
    constant = ConstantLossScale(128.0)
    constant.load_state_dict(scale.state_dict())
    assert constant.scale == 128.0


def test_the_factory_follows_the_flags() -> None:
    assert isinstance(build_loss_scale(PrecisionConfig(fp16=True)), DynamicLossScale)
    assert build_loss_scale(PrecisionConfig(fp16=True)).scale == 2.0**32
    assert isinstance(build_loss_scale(PrecisionConfig(fp16=True, loss_scale=512.0)), ConstantLossScale)
    assert build_loss_scale(PrecisionConfig()).scale == 1.0


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"initial_loss_scale": 0.5}, "--initial-loss-scale"),
        ({"min_loss_scale": 0.0}, "--min-loss-scale"),
        ({"loss_scale_window": 0}, "--loss-scale-window"),
        ({"hysteresis": 0}, "--hysteresis"),
    ],
)
def test_invalid_values_name_their_flag(arguments: dict[str, float], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        build_loss_scale(PrecisionConfig(fp16=True, **arguments))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--loss-scale"):
        ConstantLossScale(0.0)
