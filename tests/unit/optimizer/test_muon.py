"""Muon against torch's Muon and a plain loop in fp64."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.distributed.group import Group
from megatron.optimizer.matrix_gather import _plan_waves
from megatron.optimizer.muon import newton_schulz
from megatron.parallel.tensor.shards import ParamSpec
from tests.support.noise import seeded
from tests.unit.optimizer.support import build_run

SPECS = {
    "wide.weight": ParamSpec((6, 10), blocks=(6,)),
    "embedding.weight": ParamSpec((7, 4)),
    "tall.weight": ParamSpec((9, 4), blocks=(9,)),
    "tall.bias": ParamSpec((9,)),
    "gated.weight": ParamSpec((2, 5, 4), blocks=(5, 5)),
    "gated.bias": ParamSpec((2, 5)),
    "fused.weight": ParamSpec((16, 6), blocks=(4, 2, 2)),  # two groups of (two queries, a key, a value), of 2 channels
}
DECAY, SCALE = 0.1, 4.0
Weights = dict[str, Tensor]


def _drawn(name: str, step: int) -> Tensor:
    return seeded(SPECS[name].logical_shape, 10 * step + list(SPECS).index(name))


def _rate(step: int) -> float:
    return 1e-2 * (1 + step % 3)


def _trained(
    dtype: torch.dtype, steps: int, publish: bool = False, surge: float = 1.0, **settings: Any
) -> tuple[Weights, Weights]:
    """Weights after some steps, and the published update of the last; ``surge`` multiplies every second gradient."""
    grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    flags = {"optimizer": "muon", "adam_beta2": 0.95, **settings}
    run = build_run({name: _drawn(name, 99).to(dtype) for name in SPECS}, grad_dtype, SCALE, SPECS, **flags)
    for step in range(steps):
        run.set_grads(partial(_drawn, step=step), SCALE * surge ** (step % 2))
        run.step(step, lr=_rate(step), weight_decay=DECAY, needs_update=publish and step > 1)
    assert run.optimizer.steps == steps
    return {name: param.data for name, param in run.params.items()}, run.grads()


def _matrices(name: str, x: Tensor, split: bool) -> list[Tensor]:
    """The matrices of a parameter, by explicit indices."""
    if name == "gated.weight":
        return [x[0], x[1]]
    if name == "fused.weight" and split:
        rows = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15])
        return [x[index] for index in rows]
    return [x]


def _joined(name: str, matrices: list[Tensor]) -> Tensor:
    if name == "gated.weight":
        return torch.stack(matrices)
    if len(matrices) == 3:
        q, k, v = matrices
        return torch.cat([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]])
    return matrices[0]


def _quintic(x: np.ndarray, steps: int) -> np.ndarray:
    """The iteration as a repeated odd polynomial of the singular values."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


def _plain_loop(steps: int, scale: Any, momentum: float, nesterov: bool, ns_steps: int, split: bool) -> Weights:
    weights = {name: _drawn(name, 99) for name in SPECS}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(steps):
        for name, w in weights.items():
            g, rate = _drawn(name, step), _rate(step)
            decay = DECAY if name.endswith("weight") else 0.0
            if SPECS[name].blocks:
                first[name] = momentum * first[name] + (1 - momentum) * g
                mixed = (1 - momentum) * g + momentum * first[name] if nesterov else first[name]
                updates = [
                    torch.from_numpy(_quintic(x.numpy(), ns_steps)) * scale(*x.shape)
                    for x in _matrices(name, mixed, split)
                ]
                weights[name] = w * (1 - rate * decay) - rate * _joined(name, updates)
                continue
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            root = (second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
            weights[name] = w * (1 - rate * decay) - rate * first[name] / (1 - 0.9 ** (step + 1)) / root
    return weights


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, lambda r, c: 0.2 * math.sqrt(max(r, c))),
        ({"muon_scale_mode": "shape_scaling", "muon_nesterov": False}, lambda r, c: 0.2 * math.sqrt(max(1, r / c))),
        (
            {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 1.5, "muon_num_ns_steps": 3},
            lambda r, c: 1.5 * math.sqrt(r / c),
        ),
        ({"muon_momentum": 0.0}, lambda r, c: 0.2 * math.sqrt(max(r, c))),
        ({"muon_split_qkv": False}, lambda r, c: 0.2 * math.sqrt(max(r, c))),
    ],
    ids=["default", "as published without Nesterov", "rows over columns", "without momentum", "a fused projection"],
)
def test_ten_steps_match_a_plain_loop(settings: dict[str, Any], scale: Any) -> None:
    weights, _ = _trained(torch.float64, 10, **settings)
    momentum, nesterov = settings.get("muon_momentum", 0.95), settings.get("muon_nesterov", True)
    split = settings.get("muon_split_qkv", True)
    expected = _plain_loop(10, scale, momentum, nesterov, settings.get("muon_num_ns_steps", 5), split)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("spectral", "match_rms_adamw"), ("shape_scaling", "original")], ids=["spectral", "original"]
)
def test_matrices_match_torch(ours: str, theirs: str, nesterov: bool) -> None:
    """In bf16, as torch's Muon: to the bit, except for the product with the scale."""
    names = ("wide.weight", "tall.weight")
    settings: dict[str, Any] = {"muon_scale_mode": ours, "muon_nesterov": nesterov}
    settings |= {"muon_extra_scale_factor": 0.2 if ours == "spectral" else 1.0, "muon_fp32_matmul_prec": "medium"}
    weights, _ = _trained(torch.float32, 8, **settings)
    params = {name: nn.Parameter(_drawn(name, 99).float()) for name in names}
    muon = torch.optim.Muon(
        params.values(), lr=1.0, weight_decay=DECAY, momentum=0.95, nesterov=nesterov, adjust_lr_fn=theirs
    )
    for step in range(8):
        muon.param_groups[0]["lr"] = _rate(step)
        for name, param in params.items():
            param.grad = _drawn(name, step).float()
        muon.step()
    for name, param in params.items():
        torch.testing.assert_close(weights[name], param.data, rtol=1e-6, atol=1e-6)


def test_gradients_are_clipped_before_they_enter_the_momentum() -> None:
    """Muon ignores the scale of all gradients, but not of some: here every second is 30 times larger."""
    clipped = {dtype: _trained(dtype, 6, clip_grad=0.5, surge=30.0)[0] for dtype in (torch.float32, torch.float64)}
    free = _trained(torch.float64, 6, surge=30.0)[0]
    for name, weight in clipped[torch.float32].items():
        torch.testing.assert_close(weight.double(), clipped[torch.float64][name], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(clipped[torch.float64][name], free[name], rtol=1e-2, atol=1e-2)


def test_half_precision_follows_main_values_of_fp32() -> None:
    """With iterations in bf16."""
    weights, expected = _trained(torch.bfloat16, 3)[0], _trained(torch.float32, 3, muon_fp32_matmul_prec="medium")[0]
    for name, weight in weights.items():
        torch.testing.assert_close(weight.float(), expected[name], rtol=0.01, atol=0.02)
    exact = _trained(torch.float32, 3)[0]
    assert any(not torch.equal(exact[name], expected[name]) for name in SPECS)


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float16, "highest", torch.float32),
        (torch.float32, "medium", torch.bfloat16),
    ],
    ids=str,
)
def test_dtype_of_the_iterations(dtype: torch.dtype, precision: str | None, expected: torch.dtype) -> None:
    with mock.patch("megatron.optimizer.muon.newton_schulz", side_effect=newton_schulz) as iterate:
        _trained(dtype, 1, muon_fp32_matmul_prec=precision)
    assert {call.args[0].dtype for call in iterate.call_args_list} == {expected}


def test_the_published_update_times_the_rate_is_subtracted() -> None:
    before, after = _trained(torch.float64, 3)[0], _trained(torch.float64, 4, publish=True)
    for name, direction in after[1].items():
        moved = (before[name] - after[0][name]) / _rate(3)
        torch.testing.assert_close(direction, moved, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 6)])
def test_newton_schulz_keeps_singular_vectors_and_equalizes_values(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = newton_schulz(x, 5)
    np.testing.assert_allclose(y.numpy(), _quintic(x.numpy(), 5), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(newton_schulz(1e-6 * x, 5), y, rtol=1e-9, atol=1e-10)  # as small as gradients
    values = torch.linalg.svdvals(newton_schulz(torch.eye(*shape, dtype=torch.float64) + 0.3 * x, 5))
    assert ((values > 0.65) & (values < 1.25)).all()
    assert (newton_schulz(torch.zeros(shape), 5) == 0).all()


def test_work_is_divided_evenly_with_few_moves() -> None:
    """A replica has four square matrices, the other eight flat ones, which take little work. Only two squares move; the
    two tensor-parallel ranks of a replica have the same work."""
    shapes = [(64, 64)] * 4 + [(2, 1024)] * 8
    slots: list[Any] = [SimpleNamespace(spec=ParamSpec(shape, blocks=(shape[0],)), name=shape) for shape in shapes]
    shards = [((0, 4096), (0, 0))] * 4 + [((0, 0), (0, 2048))] * 8
    waves = list(_plan_waves(list(zip(slots, shards, strict=True)), Group(None, (0, 1), 0, "dp", "none"), 2))
    shapes_by_owner: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for wave in waves:
        owners = [(job.replica, job.tensor) for job in wave.jobs]
        assert len(set(owners)) == len(owners)
        for owner, job in zip(owners, wave.jobs, strict=True):
            shapes_by_owner.setdefault(owner, []).append(job.slot.spec.logical_shape)
    square, flat = (64, 64), (2, 1024)
    mixed = [square] + [flat] * 4
    assert shapes_by_owner == {(0, 0): [square], (0, 1): [square], (1, 0): mixed, (1, 1): mixed}
