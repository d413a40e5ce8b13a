"""Corrections of delayed gradients, on numbers that are easy to follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron.parallel.data.delay_correction import GradientExtrapolation, LookAhead
from megatron.parallel.data.param_shards import ParamShard


def _shard(main: list[float], grad: list[float], grad_dtype: torch.dtype = torch.float32) -> ParamShard:
    values = SimpleNamespace(
        main=torch.tensor(main), model=torch.zeros(len(main)), grad=torch.tensor(grad, dtype=grad_dtype)
    )
    return cast(ParamShard, values)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16])
def test_gradients_of_different_loss_scales_are_extrapolated(grad_dtype: torch.dtype) -> None:
    shard = _shard([0.0, 0.0], [8.0, -4.0], grad_dtype)  # 1 and -0.5 with a loss scale of 8
    extrapolation = GradientExtrapolation([shard], strength=0.5)
    extrapolation.apply(8.0)
    assert shard.grad.tolist() == [8.0, -4.0]
    extrapolation.end_step(updated=True)
    shard.grad.fill_(torch.inf)  # a sum that overflows is not remembered
    extrapolation.apply(8.0)
    extrapolation.end_step(updated=False)
    shard.grad.copy_(torch.tensor([8.0, 2.0]))  # 2 and 0.5 with a loss scale of 4
    extrapolation.apply(4.0)
    assert shard.grad.tolist() == [4 * (2 + 0.5 * 1), 4 * (0.5 + 0.5 * 1)]
    extrapolation.end_step(updated=True)
    assert extrapolation.previous is not None
    assert extrapolation.previous[0].tolist() == [2.0, 0.5]


def test_the_next_gradients_are_computed_ahead_of_the_last_update() -> None:
    shard = _shard([1.0, 2.0], [0.0, 0.0])
    look_ahead = LookAhead([shard], strength=0.5)
    look_ahead.move_model()
    assert shard.model.tolist() == [1.0, 2.0]
    look_ahead.remember()
    shard.main.add_(torch.tensor([1.0, -2.0]))
    look_ahead.move_model()
    assert shard.model.tolist() == [2.5, -1.0]
    look_ahead.remember()
    shard.main.add_(torch.tensor([0.5, 0.5]))
    look_ahead.move_model()
    assert shard.model.tolist() == [2.75, 0.75]
