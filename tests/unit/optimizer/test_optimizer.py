"""The optimizer against torch's own, and its norms."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import LM_LOSS
from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.kernels import ops
from megatron.kernels.ops import sum_of_squares
from megatron.optimizer.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.tensor.shards import ParamSpec

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "b.weight": (3, 6)}


def _value(name: str, step: int) -> Tensor:
    seed = 10 * step + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def _build(
    dtype: torch.dtype, grad_dtype: torch.dtype, scale: LossScale, **config: object
) -> tuple[Optimizer, dict[str, nn.Parameter], FlatBuffer]:
    params = {name: nn.Parameter(_value(name, -1).to(dtype)) for name in SHAPES}
    listed = [(name, name, ParamSpec(tuple(p.shape)), p) for name, p in params.items()]
    buffer = FlatBuffer(listed, grad_dtype, single_process().dp, None)
    settings = OptimizerConfig(**{"lr": 1e-2, **config})  # type: ignore[arg-type]
    return (
        Optimizer(
            [buffer],
            single_process(),
            settings,
            scale,
            CompressionPlan({}),
            Ledger(),
            sharded=False,
            log_params_norm=True,
            log_num_zeros=True,
        ),
        params,
        buffer,
    )


def _set_grads(buffer: FlatBuffer, step: int, factor: float = 1.0) -> None:
    buffer.grads_flat.zero_()
    for bucket in buffer.buckets:
        for slot in bucket.slots:
            buffer.grads_flat[slot.start : slot.stop].copy_(_value(slot.name, step).flatten() * factor)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_twenty_steps_equal_torchs_optimizer(kind: str, clip: float) -> None:
    ours, params, buffer = _build(torch.float32, torch.float32, ConstantLossScale(1.0), optimizer=kind, clip_grad=clip)
    theirs = {name: nn.Parameter(_value(name, -1)) for name in SHAPES}
    groups = [
        {"params": [p for p in theirs.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference: torch.optim.Optimizer
    if kind == "adam":
        reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    else:
        reference = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    for step in range(20):
        lr = 1e-2 * (1 + step % 3)
        _set_grads(buffer, step)
        outcome = ours.step({LM_LOSS: (12.0, 4.0)}, 0, lr=lr, weight_decay=0.1)
        for name, param in theirs.items():
            param.grad = _value(name, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip if clip > 0 else math.inf)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert (outcome.losses, outcome.skipped) == ({LM_LOSS: 3.0}, False)
    for name, param in params.items():
        torch.testing.assert_close(param.data, theirs[name].data, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1024.0)])
def test_half_precision_follows_fp32_main_values(dtype: torch.dtype, scale: float) -> None:
    """The update is that of fp32 parameters; the model holds its rounding."""
    ours, params, buffer = _build(dtype, torch.float32, ConstantLossScale(scale), clip_grad=1.0)
    theirs = {name: nn.Parameter(_value(name, -1).to(dtype).float()) for name in SHAPES}
    groups = [
        {"params": [p for p in theirs.values() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(10):
        _set_grads(buffer, step, scale)
        ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=1e-2, weight_decay=0.01)
        for name, param in theirs.items():
            param.grad = _value(name, step)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.step()
    for piece in ours.shards:
        wanted = theirs[piece.slot.name].data
        torch.testing.assert_close(piece.main.view(wanted.shape), wanted, rtol=2e-6, atol=1e-7)
        assert torch.equal(params[piece.slot.name].data, piece.main.view(wanted.shape).to(dtype))


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    scale = DynamicLossScale(2.0**16, hysteresis=1)
    ours, params, buffer = _build(torch.float16, torch.float32, scale)
    before = {name: p.detach().clone() for name, p in params.items()}
    _set_grads(buffer, 0, 2.0**16)
    buffer.grads_flat[3] = torch.inf
    outcome = ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=1e-2, weight_decay=0.1)
    assert (outcome.skipped, outcome.grad_norm, outcome.loss_scale) == (True, None, 2.0**16)
    assert scale.scale == 2.0**15
    assert all(torch.equal(p.data, before[name]) for name, p in params.items())
    _set_grads(buffer, 1, 2.0**15)
    assert not ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=1e-2, weight_decay=0.1).skipped
    assert not torch.equal(params["a.weight"].data, before["a.weight"])


def test_a_nan_skips_the_step_in_fp32() -> None:
    ours, params, buffer = _build(torch.float32, torch.float32, ConstantLossScale(1.0))
    before = params["b.weight"].detach().clone()
    _set_grads(buffer, 0)
    buffer.grads_flat[buffer.buckets[-1].slots[-1].stop - 1] = torch.nan
    assert ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=1e-2, weight_decay=0.1).skipped
    assert torch.equal(params["b.weight"].data, before)


RULES: dict[str, dict[str, object]] = {
    "adam": {},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "lamb": {"optimizer": "lamb"},
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_the_published_update_is_what_was_subtracted_over_the_learning_rate(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    ours, params, buffer = _build(dtype, dtype, ConstantLossScale(2.0), clip_grad=5.0, **RULES[name])
    for step, lr in enumerate((1e-2, 3e-3)):
        before = {name: p.detach().clone() for name, p in params.items()}
        _set_grads(buffer, step, 2.0)
        ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=lr, weight_decay=0.1, publish_update=True)
        for bucket in buffer.buckets:
            for slot in bucket.slots:
                update = buffer.grads_flat[slot.start : slot.stop].view(slot.param.shape)
                wanted = (before[slot.name] - params[slot.name].data) / lr
                torch.testing.assert_close(update, wanted, rtol=tolerance, atol=tolerance)
                assert float(update.abs().max()) > 0.1


@pytest.mark.parametrize("lr", [0.0, 1e-12])
@pytest.mark.parametrize("name", RULES)
def test_the_published_update_does_not_depend_on_the_learning_rate(name: str, lr: float) -> None:
    """A warm-up begins at 0, and what a tiny rate subtracts is rounded away."""
    published = []
    for rate in (lr, 1e-2):
        ours, _, buffer = _build(torch.float32, torch.float32, ConstantLossScale(1.0), **RULES[name])
        _set_grads(buffer, 0)
        ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=rate, weight_decay=0.1, publish_update=True)
        published.append(buffer.grads_flat.clone())
    assert float(published[0].abs().max()) > 0.05
    torch.testing.assert_close(*published, rtol=1e-6, atol=1e-6)


def test_the_published_update_of_frozen_adam() -> None:
    ours, params, buffer = _build(torch.float32, torch.float32, ConstantLossScale(1.0))
    for step in range(4):
        before = {name: p.detach().clone() for name, p in params.items()}
        _set_grads(buffer, step)
        ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=1e-2, weight_decay=0.1, publish_update=True, freeze_variance=step >= 2)
        for bucket in buffer.buckets:
            for slot in bucket.slots:
                update = buffer.grads_flat[slot.start : slot.stop].view(slot.param.shape)
                wanted = (before[slot.name] - params[slot.name].data) / 1e-2
                torch.testing.assert_close(update, wanted, rtol=1e-4, atol=1e-4)


def test_norms_and_zeros_are_counted() -> None:
    ours, params, buffer = _build(torch.float32, torch.float32, ConstantLossScale(1.0))
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in params.values()))
    _set_grads(buffer, 0)
    buffer.grads_flat[:7] = 0.0
    outcome = ours.step({LM_LOSS: (1.0, 1.0)}, 0, lr=0.0, weight_decay=0.0)
    assert outcome.params_norm == pytest.approx(norm, rel=1e-6)
    assert outcome.num_zeros == 7


def test_the_norm_of_many_small_numbers_is_accurate() -> None:
    """A running fp32 sum of 40 million squares is off in the second digit."""
    x = torch.full((40_000_000,), 1e-3)
    x[::7] = 2e-3
    wanted = float(x.double().square().sum())
    assert math.sqrt(sum_of_squares([x])) == pytest.approx(math.sqrt(wanted), rel=1e-6)


def test_the_norm_of_fp16_numbers_may_exceed_fp16() -> None:
    x = torch.full((10_000,), 6e4, dtype=torch.float16)
    assert sum_of_squares([x]) == pytest.approx(float(x.double().square().sum()), rel=1e-5)
    assert sum_of_squares([]) == 0.0
    x[5] = torch.inf
    assert not math.isfinite(sum_of_squares([x]))


def test_what_adjoins_in_memory_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two gradients of one buffer, one behind a gap, one of another buffer and a matrix."""
    flat, other = torch.randn(100, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    parts = [flat[:10], flat[10:40], flat[50:], other, other.view(4, 5), other.float()]
    passes = mock.Mock(side_effect=ops.finite_norm)
    monkeypatch.setattr(ops, "finite_norm", passes)
    found = sum_of_squares(parts)
    assert [call.args[0].numel() for call in passes.call_args_list] == [40, 50, 20, 20, 20]
    assert found == pytest.approx(sum(float(x.double().square().sum()) for x in parts), rel=1e-6)
    assert sum_of_squares([flat[10:40], flat[:10]]) == pytest.approx(float(flat[:40].square().sum()), rel=1e-12)
