"""LAMB against a plain loop."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.noise import seeded
from tests.unit.optimizer.support import build_run

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "empty.weight": (3, 4), "norm.weight": (5,), "b.weight": (3, 6)}
BETAS, EPS, DECAY, SCALE = (0.9, 0.95), 1e-6, 0.1, 4.0


def _drawn(name: str, step: int) -> Tensor:
    return seeded(SHAPES[name], 10 * step + list(SHAPES).index(name))


def _first(name: str) -> Tensor:
    """Initial weights; a matrix is zero, so its norm scales nothing."""
    return torch.zeros(SHAPES[name], dtype=torch.float64) if name.startswith("empty") else 3.0 * _drawn(name, -1)


def _rate(step: int) -> float:
    return 1e-2 * (1 + step % 3)


def _plain_loop(steps: int, clip: float) -> dict[str, Tensor]:
    """The rule of apex's FusedLAMB for clipped gradients."""
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


def _trained(dtype: torch.dtype, grad_dtype: torch.dtype, steps: int, clip: float) -> dict[str, Tensor]:
    flags: dict[str, Any] = {"lamb_beta1": BETAS[0], "lamb_beta2": BETAS[1], "lamb_eps": EPS, "clip_grad": clip}
    values = {name: _first(name).to(dtype) for name in SHAPES}
    run = build_run(values, grad_dtype, SCALE, optimizer="lamb", **flags)
    for step in range(steps):
        run.set_grads(partial(_drawn, step=step), SCALE)
        run.step(step, lr=_rate(step), weight_decay=DECAY)
    assert run.optimizer.steps == steps
    return {name: param.data for name, param in run.params.items()}


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_twenty_steps_match_a_plain_loop(clip: float) -> None:
    weights, expected = _trained(torch.float64, torch.float64, 20, clip), _plain_loop(20, clip)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_half_precision_follows_main_values_of_fp32(grad_dtype: torch.dtype) -> None:
    weights, expected = _trained(torch.bfloat16, grad_dtype, 3, 0.0), _plain_loop(3, 0.0)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=0.02, atol=0.02)


def test_a_matrix_without_gradients_shrinks_by_the_learning_rate() -> None:
    """Whatever the weight decay, which alone gives the direction."""
    run = build_run({"w": torch.ones(2, 3, dtype=torch.float64)}, torch.float64, optimizer="lamb")
    run.step(lr=0.25, weight_decay=0.01)
    torch.testing.assert_close(run.params["w"].data, torch.full((2, 3), 0.75).double(), rtol=1e-12, atol=0)
