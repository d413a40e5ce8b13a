"""Muon against torch's own and a plain loop in fp64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.optimizer.loss_scale import ConstantLossScale
from megatron.optimizer.matrix_gather import _waves
from megatron.optimizer.muon import newton_schulz
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.tensor.shards import ParamSpec

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
    seed = 10 * step + list(SPECS).index(name)
    generator = torch.Generator().manual_seed(seed % 2**31)
    return torch.randn(SPECS[name].logical_shape, generator=generator, dtype=torch.float64)


def _rate(step: int) -> float:
    return 1e-2 * (1 + step % 3)


def _trained(
    dtype: torch.dtype, steps: int, publish: bool = False, surge: float = 1.0, **settings: Any
) -> tuple[Weights, Weights]:
    """Weights after some steps, and what the last one left in the gradients; ``surge``: a factor of some of these."""
    params = {name: nn.Parameter(_drawn(name, 99).to(dtype)) for name in SPECS}
    listed = [(name, name, spec, params[name]) for name, spec in SPECS.items()]
    buffer = FlatBuffer(listed, torch.float64 if dtype == torch.float64 else torch.float32, single_process().dp, None)
    config = OptimizerConfig(**{"optimizer": "muon", "lr": 1.0, "clip_grad": 0.0, "adam_beta2": 0.95, **settings})
    parts: list[Any] = [CompressionPlan({}), Ledger()]
    ours = Optimizer([buffer], single_process(), config, ConstantLossScale(SCALE), *parts, sharded=False)
    slots = [slot for bucket in buffer.buckets for slot in bucket.slots]
    for step in range(steps):
        buffer.grads_flat.zero_()
        for slot in slots:
            buffer.grads_flat[slot.start : slot.stop].copy_(
                _drawn(slot.name, step).flatten() * SCALE * surge ** (step % 2)
            )
        ours.step(
            {"lm loss": (1.0, 1.0)}, step, lr=_rate(step), weight_decay=DECAY, publish_update=publish and step > 1
        )
    assert ours.steps == steps
    left = {slot.name: buffer.grads_flat[slot.start : slot.stop].view(slot.param.shape) for slot in slots}
    return {name: param.data for name, param in params.items()}, left


def _matrices(name: str, x: Tensor, split: bool) -> list[Tensor]:
    """The matrices of a parameter, by indices written out."""
    if name == "gated.weight":
        return [x[0], x[1]]
    if name == "fused.weight" and split:
        rows = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15])
        return [x[index] for index in rows]
    return [x]


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if name == "gated.weight":
        return torch.stack(parts)
    if len(parts) == 3:
        q, k, v = parts
        return torch.cat([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]])
    return parts[0]


def _quintic(x: np.ndarray, steps: int) -> np.ndarray:
    """What the iteration makes of a matrix: an odd polynomial of its singular values, again and again."""
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
                made = [
                    torch.from_numpy(_quintic(x.numpy(), ns_steps)) * scale(*x.shape)
                    for x in _matrices(name, mixed, split)
                ]
                weights[name] = w * (1 - rate * decay) - rate * _joined(name, made)
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
def test_ten_steps_are_those_of_the_plain_loop(settings: dict[str, Any], scale: Any) -> None:
    ours, _ = _trained(torch.float64, 10, **settings)
    momentum, nesterov = settings.get("muon_momentum", 0.95), settings.get("muon_nesterov", True)
    split = settings.get("muon_split_qkv", True)
    wanted = _plain_loop(10, scale, momentum, nesterov, settings.get("muon_num_ns_steps", 5), split)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("spectral", "match_rms_adamw"), ("shape_scaling", "original")], ids=["spectral", "original"]
)
def test_matrices_move_as_those_of_torch(ours: str, theirs: str, nesterov: bool) -> None:
    """In bf16, which is all that it has: bit by bit but for the product with the scale."""
    names = ("wide.weight", "tall.weight")
    settings: dict[str, Any] = {
        "muon_fp32_matmul_prec": "medium", "muon_scale_mode": ours, "muon_nesterov": nesterov,
    }  # fmt: skip
    factor = 0.2 if ours == "spectral" else 1.0
    found, _ = _trained(torch.float32, 8, muon_extra_scale_factor=factor, **settings)
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
        torch.testing.assert_close(found[name], param.data, rtol=1e-6, atol=1e-6)


def test_gradients_are_clipped_before_they_enter_the_momentum() -> None:
    """Of matrices only their proportions count, but those of steps too: here some gradients are 30 times as large."""
    clipped = {dtype: _trained(dtype, 6, clip_grad=0.5, surge=30.0)[0] for dtype in (torch.float32, torch.float64)}
    free = _trained(torch.float64, 6, surge=30.0)[0]
    for name, weight in clipped[torch.float32].items():
        torch.testing.assert_close(weight.double(), clipped[torch.float64][name], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(clipped[torch.float64][name], free[name], rtol=1e-2, atol=1e-2)


def test_half_precision_follows_main_values_of_fp32() -> None:
    """And computes in bf16 then."""
    settings: dict[str, Any] = {"muon_fp32_matmul_prec": "medium"}
    ours, wanted = _trained(torch.bfloat16, 3)[0], _trained(torch.float32, 3, **settings)[0]
    for name, weight in ours.items():
        torch.testing.assert_close(weight.float(), wanted[name], rtol=0.01, atol=0.02)
    exact = _trained(torch.float32, 3)[0]
    assert any(not torch.equal(exact[name], wanted[name]) for name in SPECS)


@pytest.mark.parametrize(
    ("dtype", "asked", "wanted"),
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
def test_the_type_of_the_iterations(
    dtype: torch.dtype, asked: str | None, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[torch.dtype] = set()

    def noting(x_mn: Tensor, steps: int) -> Tensor:
        seen.add(x_mn.dtype)
        return newton_schulz(x_mn, steps)

    monkeypatch.setattr("megatron.optimizer.muon.newton_schulz", noting)
    _trained(dtype, 1, muon_fp32_matmul_prec=asked)
    assert seen == {wanted}


def test_published_directions_are_what_was_subtracted() -> None:
    before, after = _trained(torch.float64, 3)[0], _trained(torch.float64, 4, publish=True)
    for name, direction in after[1].items():
        moved = (before[name] - after[0][name]) / _rate(3)
        torch.testing.assert_close(direction, moved, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 6)])
def test_newton_schulz_leaves_singular_vectors_and_evens_out_values(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = newton_schulz(x, 5)
    np.testing.assert_allclose(y.numpy(), _quintic(x.numpy(), 5), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(newton_schulz(1e-6 * x, 5), y, rtol=1e-9, atol=1e-10)  # small as gradients are
    values = torch.linalg.svdvals(newton_schulz(torch.eye(*shape, dtype=torch.float64) + 0.3 * x, 5))
    assert ((values > 0.65) & (values < 1.25)).all()
    assert (newton_schulz(torch.zeros(shape), 5) == 0).all()


def test_the_work_is_divided_evenly_and_a_matrix_stays_where_most_of_it_is() -> None:
    """Of two replicas one holds four square matrices, the other eight flat ones, which take little work. Two squares
    are given away, and nothing else; the tensor-parallel ranks of a replica have as much work as each other."""
    shapes = [(64, 64)] * 4 + [(2, 1024)] * 8
    slots: list[Any] = [SimpleNamespace(spec=ParamSpec(shape, blocks=(shape[0],)), name=shape) for shape in shapes]
    held = [((0, 4096), (0, 0))] * 4 + [((0, 0), (0, 2048))] * 8
    waves = list(_waves(list(zip(slots, held, strict=True)), Group(None, (0, 1), 0, "dp", "none"), 2))
    owned: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for wave in waves:
        owners = [(job.replica, job.tensor) for job in wave.jobs]
        assert len(set(owners)) == len(owners)
        for owner, job in zip(owners, wave.jobs, strict=True):
            owned.setdefault(owner, []).append(job.slot.spec.logical_shape)
    square, flat = (64, 64), (2, 1024)
    assert owned == {(0, 0): [square], (0, 1): [square], (1, 0): [square] + [flat] * 4, (1, 1): [square] + [flat] * 4}
