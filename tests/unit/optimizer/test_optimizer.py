"""The optimizer against torch's optimizers, and its norms."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import LM_LOSS
from megatron.kernels import ops
from megatron.kernels.ops import sum_of_squares
from megatron.optimizer.loss_scale import DynamicLossScale
from tests.support.noise import seeded
from tests.unit.optimizer.support import Run, build_run, torch_groups

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (3, 6)}


def _value(name: str, step: int) -> Tensor:
    return seeded(SHAPES[name], 10 * step + list(SHAPES).index(name), torch.float32)


def _build(dtype: torch.dtype, grad_dtype: torch.dtype, **options: Any) -> Run:
    values = {name: _value(name, -1).to(dtype) for name in SHAPES}
    return build_run(values, grad_dtype, **{"lr": 1e-2, "clip_grad": 1.0, **options})


def _set_grads(run: Run, step: int, factor: float = 1.0) -> None:
    run.set_grads(lambda name: _value(name, step), factor)


def _copies(run: Run) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in run.params.items()}


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_twenty_steps_match_torch(kind: str, clip: float) -> None:
    run = _build(torch.float32, torch.float32, optimizer=kind, clip_grad=clip)
    theirs = {name: nn.Parameter(_value(name, -1)) for name in SHAPES}
    groups = torch_groups(theirs, 0.1)
    reference: torch.optim.Optimizer
    if kind == "adam":
        reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    else:
        reference = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    for step in range(20):
        lr = 1e-2 * (1 + step % 3)
        _set_grads(run, step)
        outcome = run.step(losses=(12.0, 4.0), lr=lr, weight_decay=0.1)
        for name, param in theirs.items():
            param.grad = _value(name, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip if clip > 0 else math.inf)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert (outcome.losses, outcome.skipped) == ({LM_LOSS: 3.0}, False)
    for name, param in run.params.items():
        torch.testing.assert_close(param.data, theirs[name].data, rtol=2e-6, atol=1e-7)


class _ApexAdam(torch.optim.Optimizer):
    """The rule of apex's FusedAdam, and where it counts its steps: in the groups, from the first step on."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            corrections = [1 - beta ** group["step"] for beta in group["betas"]]
            for param in group["params"]:
                state = self.state[param]
                state["exp_avg"].lerp_(param.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(param.grad**2, 1 - group["betas"][1])
                root = (state["exp_avg_sq"] / corrections[1]).sqrt() + group["eps"]
                update = state["exp_avg"] / corrections[0] / root + group["weight_decay"] * param
                param.sub_(update, alpha=group["lr"])


def test_the_steps_of_apex_are_counted_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=_ApexAdam))
    runs = [_build(torch.float32, torch.float32, use_apex=use_apex) for use_apex in (False, True)]
    for step in range(6):
        if step == 2:  # resume: as the moments are new, too, only the count matters
            runs = [_build(torch.float32, torch.float32, use_apex=use_apex) for use_apex in (False, True)]
            for run in runs:
                run.optimizer.steps = 2
        for run in runs:
            _set_grads(run, step)
            run.step(lr=1e-2, weight_decay=0.1, needs_update=True, freezes_variance=step >= 4)
        assert [run.optimizer.steps for run in runs] == [step + 1] * 2
        torch.testing.assert_close(runs[1].buffer.grads_flat, runs[0].buffer.grads_flat, rtol=1e-4, atol=1e-5)
        for name, param in runs[1].params.items():
            torch.testing.assert_close(param.data, runs[0].params[name].data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1024.0)])
def test_half_precision_parameters_are_rounded_fp32_values(dtype: torch.dtype, scale: float) -> None:
    run = _build(dtype, torch.float32, scale=scale)
    theirs = {name: nn.Parameter(_value(name, -1).to(dtype).float()) for name in SHAPES}
    reference = torch.optim.AdamW(torch_groups(theirs, 0.01), lr=1e-2)
    for step in range(10):
        _set_grads(run, step, scale)
        run.step(lr=1e-2, weight_decay=0.01)
        for name, param in theirs.items():
            param.grad = _value(name, step)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.step()
    for shard in run.optimizer.shards:
        expected = theirs[shard.slot.name].data
        torch.testing.assert_close(shard.main.view(expected.shape), expected, rtol=2e-6, atol=1e-7)
        assert torch.equal(run.params[shard.slot.name].data, shard.main.view(expected.shape).to(dtype))


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    scale = DynamicLossScale(2.0**16, hysteresis=1)
    run = _build(torch.float16, torch.float32, scale=scale)
    before = _copies(run)
    _set_grads(run, 0, 2.0**16)
    run.buffer.grads_flat[3] = torch.inf
    outcome = run.step(lr=1e-2, weight_decay=0.1)
    assert (outcome.skipped, outcome.grad_norm, outcome.loss_scale) == (True, None, 2.0**16)
    assert scale.scale == 2.0**15
    assert all(torch.equal(param.data, before[name]) for name, param in run.params.items())
    _set_grads(run, 1, 2.0**15)
    assert not run.step(lr=1e-2, weight_decay=0.1).skipped
    assert not torch.equal(run.params["a.weight"].data, before["a.weight"])


def test_a_nan_skips_the_step_in_fp32() -> None:
    run = _build(torch.float32, torch.float32)
    before = _copies(run)
    _set_grads(run, 0)
    run.buffer.grads_flat[run.buffer.buckets[-1].slots[-1].stop - 1] = torch.nan
    assert run.step(lr=1e-2, weight_decay=0.1).skipped
    assert torch.equal(run.params["b.weight"].data, before["b.weight"])


RULES: dict[str, dict[str, object]] = {
    "adam": {},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "lamb": {"optimizer": "lamb"},
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_the_published_update_times_the_rate_is_subtracted(name: str, dtype: torch.dtype, tolerance: float) -> None:
    run = _build(dtype, dtype, scale=2.0, **{"clip_grad": 5.0, **RULES[name]})
    for step, lr in enumerate((1e-2, 3e-3)):
        before = _copies(run)
        _set_grads(run, step, 2.0)
        run.step(lr=lr, weight_decay=0.1, needs_update=True)
        for parameter, update in run.grads().items():
            expected = (before[parameter] - run.params[parameter].data) / lr
            torch.testing.assert_close(update, expected, rtol=tolerance, atol=tolerance)
            assert float(update.abs().max()) > 0.1


@pytest.mark.parametrize("lr", [0.0, 1e-12])
@pytest.mark.parametrize("name", RULES)
def test_the_published_update_does_not_depend_on_the_learning_rate(name: str, lr: float) -> None:
    """A warm-up begins at 0, and at a tiny rate the difference is rounded away."""
    published = []
    for rate in (lr, 1e-2):
        run = _build(torch.float32, torch.float32, **RULES[name])
        _set_grads(run, 0)
        run.step(lr=rate, weight_decay=0.1, needs_update=True)
        published.append(run.buffer.grads_flat.clone())
    assert float(published[0].abs().max()) > 0.05
    torch.testing.assert_close(*published, rtol=1e-6, atol=1e-6)


def test_the_published_update_of_frozen_adam() -> None:
    run = _build(torch.float32, torch.float32)
    for step in range(4):
        before = _copies(run)
        _set_grads(run, step)
        run.step(lr=1e-2, weight_decay=0.1, needs_update=True, freezes_variance=step >= 2)
        for name, update in run.grads().items():
            expected = (before[name] - run.params[name].data) / 1e-2
            torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-4)


def test_norms_and_zeros_are_counted() -> None:
    run = _build(torch.float32, torch.float32)
    norm = math.sqrt(sum(float(param.detach().double().square().sum()) for param in run.params.values()))
    _set_grads(run, 0)
    run.buffer.grads_flat[:7] = 0.0
    outcome = run.step(lr=0.0, weight_decay=0.0)
    assert outcome.params_norm == pytest.approx(norm, rel=1e-6)
    assert outcome.num_zeros == 7


def test_the_norm_of_many_small_numbers_is_accurate() -> None:
    """A running fp32 sum of 40 million squares is off in the second digit."""
    x = torch.full((40_000_000,), 1e-3)
    x[::7] = 2e-3
    large, small = float(x[0]), float(x[1])
    count = len(range(0, len(x), 7))
    expected = count * large**2 + (len(x) - count) * small**2
    assert math.sqrt(sum_of_squares([x])) == pytest.approx(math.sqrt(expected), rel=1e-6)


def test_the_norm_of_fp16_numbers_may_exceed_fp16() -> None:
    x = torch.full((10_000,), 6e4, dtype=torch.float16)
    assert sum_of_squares([x]) == pytest.approx(float(x.double().square().sum()), rel=1e-5)
    assert sum_of_squares([]) == 0.0
    x[5] = torch.inf
    assert not math.isfinite(sum_of_squares([x]))


def test_adjacent_tensors_are_summed_in_a_single_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adjacent gradients, another after a gap, a second buffer, a matrix, and a tensor of another type."""
    flat, other = torch.randn(100, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    tensors = [flat[:10], flat[10:40], flat[50:], other, other.view(4, 5), other.float()]
    passes = mock.Mock(side_effect=ops.finite_norm)
    monkeypatch.setattr(ops, "finite_norm", passes)
    total = sum_of_squares(tensors)
    assert [call.args[0].numel() for call in passes.call_args_list] == [40, 50, 20, 20, 20]
    assert total == pytest.approx(sum(float(x.double().square().sum()) for x in tensors), rel=1e-6)
    assert sum_of_squares([flat[10:40], flat[:10]]) == pytest.approx(float(flat[:40].square().sum()), rel=1e-12)
