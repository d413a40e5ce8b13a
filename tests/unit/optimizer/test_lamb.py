"""LAMB against a plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.optimizer.loss_scale import ConstantLossScale
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.tensor.shards import ParamSpec

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "empty.weight": (3, 4), "norm.weight": (5,), "b.weight": (3, 6)}
BETAS, EPS, DECAY, SCALE = (0.9, 0.95), 1e-6, 0.1, 4.0


def _drawn(name: str, step: int) -> Tensor:
    seed = 10 * step + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _first(name: str) -> Tensor:
    """Weights; one matrix begins with zeros, whose norm scales nothing."""
    return torch.zeros(SHAPES[name], dtype=torch.float64) if name.startswith("empty") else 3.0 * _drawn(name, -1)


def _rate(step: int) -> float:
    return 1e-2 * (1 + step % 3)


def _plain_loop(steps: int, clip: float) -> dict[str, Tensor]:
    """What apex's FusedLAMB does to gradients that are clipped already, number by number where it matters."""
    weights = {name: _first(name) for name in SHAPES}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(steps):
        grads = {name: _drawn(name, step) for name in SHAPES}
        norm = math.sqrt(sum(float(x) ** 2 for g in grads.values() for x in g.flatten()))
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for name, w in weights.items():
            g = grads[name] * factor
            m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
            v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g * g
            unbiased = m[name] / (1 - BETAS[0] ** (step + 1))
            u = unbiased / ((v[name] / (1 - BETAS[1] ** (step + 1))).sqrt() + EPS)
            ratio = 1.0
            if w.dim() > 1:
                u = u + DECAY * w
                of_weights, of_update = (math.sqrt(sum(float(x) ** 2 for x in t.flatten())) for t in (w, u))
                ratio = of_weights / of_update if of_weights > 0 and of_update > 0 else 1.0
            weights[name] = w - _rate(step) * ratio * u
    return weights


def _trained(dtype: torch.dtype, grad_dtype: torch.dtype, steps: int, clip: float) -> dict[str, nn.Parameter]:
    params = {name: nn.Parameter(_first(name).to(dtype)) for name in SHAPES}
    listed = [(name, name, ParamSpec(tuple(p.shape)), p) for name, p in params.items()]
    buffer = FlatBuffer(listed, grad_dtype, single_process().dp, None)
    settings = OptimizerConfig(
        optimizer="lamb", lr=1.0, lamb_beta1=BETAS[0], lamb_beta2=BETAS[1], lamb_eps=EPS, clip_grad=clip
    )
    parts: list[Any] = [CompressionPlan({}), Ledger()]
    ours = Optimizer([buffer], single_process(), settings, ConstantLossScale(SCALE), *parts, sharded=False)
    for step in range(steps):
        buffer.grads_flat.zero_()
        for slot in (slot for bucket in buffer.buckets for slot in bucket.slots):
            buffer.grads_flat[slot.start : slot.stop].copy_(_drawn(slot.name, step).flatten() * SCALE)
        ours.step({"lm loss": (1.0, 1.0)}, step, lr=_rate(step), weight_decay=DECAY)
    assert ours.steps == steps
    return params


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_twenty_steps_are_those_of_the_plain_loop(clip: float) -> None:
    ours, wanted = _trained(torch.float64, torch.float64, 20, clip), _plain_loop(20, clip)
    for name, param in ours.items():
        torch.testing.assert_close(param.data, wanted[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_half_precision_follows_main_values_of_fp32(grad_dtype: torch.dtype) -> None:
    ours, wanted = _trained(torch.bfloat16, grad_dtype, 3, 0.0), _plain_loop(3, 0.0)
    for name, param in ours.items():
        torch.testing.assert_close(param.data.double(), wanted[name], rtol=0.02, atol=0.02)


def test_a_matrix_without_gradients_decays_alone() -> None:
    """Its direction is its own: it shrinks by the learning rate, whatever the decay."""
    param = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    buffer = FlatBuffer([("w", "w", ParamSpec((2, 3)), param)], torch.float64, single_process().dp, None)
    settings = OptimizerConfig(optimizer="lamb", lr=1.0)
    parts: list[Any] = [CompressionPlan({}), Ledger()]
    optimizer = Optimizer([buffer], single_process(), settings, ConstantLossScale(1.0), *parts, sharded=False)
    optimizer.step({"lm loss": (1.0, 1.0)}, 0, lr=0.25, weight_decay=0.01)
    torch.testing.assert_close(param.data, torch.full_like(param.data, 0.75), rtol=1e-12, atol=0)
