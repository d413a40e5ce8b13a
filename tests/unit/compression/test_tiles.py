"""Quantized messages with decisions per tile: bits under a budget, and rotations of outliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.kernels.grid import Role
from megatron.kernels.reference import rotate
from megatron.kernels.tiles import Outliers


def _quantizer(**options: Any) -> Quantizer:
    return Quantizer(FixpointConfig(**options))


def _round_trip(x: Tensor, seed: int | None = None, **options: Any) -> Tensor:
    quantizer = _quantizer(**options)
    wire = quantizer.encode(x, seed)
    assert wire.numel() == quantizer.nbytes(x.shape)
    return quantizer.decode(wire, x.shape)


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=120, deadline=None)
@given(
    count=st.integers(0, 3000),
    tenths=st.integers(11, 79),
    group=st.sampled_from([8, 24, 64]),
    grid=st.sampled_from(["auto", "minmax"]),
)
def test_bytes_are_within_the_budget_and_use_it(count: int, tenths: int, group: int, grid: str) -> None:
    """Codes and their map take at most bits x numbers, and at least that minus a tile's bit and a byte."""
    bits = tenths / 10
    whole_bits = tenths // 10
    if (bits - whole_bits) * group <= 1:
        return
    shape = torch.Size((count,))
    options = {"group": group, "grid": grid}
    scales = -(-count // group) * 4 * (2 if grid == "minmax" else 1)
    used = _quantizer(bits=bits, **options).nbytes(shape) - scales
    eights = -(-count // 8)
    assert eights * whole_bits <= used < eights * bits + 4  # to whole multiples of 4 bytes
    if count // group > 8 / (bits - whole_bits):
        assert used > eights * bits - 1 - group // 8


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(0, 2000),
    tenths=st.integers(11, 79),
    group=st.sampled_from([8, 32]),
    rotation=st.sampled_from([0, 8, 64]),
    when=st.sampled_from(["always", "outlier"]),
)
def test_a_message_has_the_documented_size(count: int, tenths: int, group: int, rotation: int, when: str) -> None:
    """Codes and map stay within the budget of the coded numbers, a multiple of 8 or of a block. Scales, the map of
    rotated blocks and the padding come on top."""
    bits, when = tenths / 10, when if rotation else "always"
    if (bits - tenths // 10) * max(group, rotation if when == "always" else 0) <= 1:
        return
    block = rotation if rotation and when == "always" else 8
    coded = -(-count // block) * block
    scales = 4 * -(-(coded if block > 8 else count) // group)
    blocks = -(-(count // rotation) // 8) if when == "outlier" else 0
    most = scales + blocks + int(bits * (coded // 8))
    nbytes = _quantizer(bits=bits, group=group, rotation=rotation, rotate_when=when).nbytes(torch.Size((count,)))
    assert nbytes <= -(-most // 4) * 4
    assert nbytes >= scales + blocks + tenths // 10 * (coded // 8)


def test_a_few_numbers_take_more_than_their_bits() -> None:
    assert _quantizer(bits=3.8, group=8).nbytes(torch.Size((1,))) == 4 + 4
    assert 8 * (_quantizer(bits=3.8, group=8, rotation=64).nbytes(torch.Size((65,))) - 4 * 16) > 3.8 * 65


@pytest.mark.parametrize("rotation", [0, 32])
def test_tiles_with_the_greatest_error_get_the_additional_bit(rotation: int) -> None:
    x = _noise(40, 32)
    loud = torch.arange(40) % 3 == 1
    x[loud] *= 10
    mixed = _round_trip(x, bits=3.3, group=32, rotation=rotation)
    low, high = (_round_trip(x, bits=bits, group=32, rotation=rotation) for bits in (3, 4))
    has_more = (mixed == high).all(dim=1)
    assert torch.equal(torch.where(has_more.unsqueeze(1), high, low), mixed)
    count = (int(40 * 4 * 3.3) - 5 - 40 * 4 * 3) // 4
    assert int(has_more.sum()) == count
    assert bool(loud[has_more].all())
    error = (low - x).square().sum(dim=1)
    assert float(error[has_more].min()) >= float(error[~has_more].max())


def test_fractional_bits_have_errors_between_those_of_whole_bits() -> None:
    x = _noise(512, 64) * _noise(512, 1, seed=1).exp()
    errors = [float((_round_trip(x, bits=bits) - x).norm()) for bits in (3, 3.3, 3.8, 4)]
    assert errors == sorted(errors, reverse=True)
    # The first additional bits gain most, since they go where the error is greatest.
    assert errors[0] - errors[1] > 0.4 * (errors[0] - errors[3])


def test_only_outliers_are_rotated() -> None:
    x = _noise(60, 64)
    stands_out = torch.arange(60) % 4 == 2
    x[stands_out, 9] = 50.0
    x = torch.cat([x.view(-1), _noise(7)])  # a short block is not rotated
    x[-1] = 50.0
    options: dict[str, Any] = {"bits": 4, "rotation": 64, "rotate_when": "outlier", "outlier_ratio": 3.0}
    decoded = _round_trip(x, **options)
    plain, rotated = _round_trip(x, bits=4), _round_trip(x, bits=4, rotation=64)
    expected = torch.where(stands_out.unsqueeze(1), rotated[: 60 * 64].view(60, 64), plain[: 60 * 64].view(60, 64))
    torch.testing.assert_close(decoded, torch.cat([expected.view(-1), plain[60 * 64 :]]), rtol=0, atol=1e-5)
    assert _quantizer(**options).nbytes(x.shape) == _quantizer(bits=4).nbytes(x.shape) + 8
    assert float((decoded - x).norm()) < 0.8 * float((plain - x).norm())


def test_an_outlier_is_defined_by_the_ratio_of_the_two_largest() -> None:
    x = torch.ones(4, 8)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = -2.1, 1.9, torch.inf, 0.0
    assert Outliers(8, 2.0).find(x.view(-1)).tolist() == [True, False, False, False]
    assert Outliers(8, 2.0).find(torch.zeros(8)).tolist() == [False]
    assert Outliers(8, 2.0).find(torch.eye(8)[0]).tolist() == [True]


TILED: tuple[dict[str, Any], ...] = (
    {"bits": 3.5, "group": 8},
    {"bits": 5, "rotation": 16, "rotate_when": "outlier", "outlier_ratio": 1.1},
    {"bits": 2.5, "group": 16, "grid": "minmax", "rotation": 8, "rotate_when": "outlier", "rounding": "stochastic"},
    {"bits": 6.3, "group": 16, "rotation": 64, "scale_dtype": "bf16", "rounding": "stochastic"},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", TILED, ids=str)
def test_tiled_messages_serve_all_roles(options: dict[str, Any], dtype: torch.dtype) -> None:
    """A residual keeps the error, a reference moves to the receiver's value, and messages add and subtract."""
    quantizer, x = _quantizer(**options), _noise(9, 31).to(dtype)
    reference = _noise(9, 31, seed=1)
    residual = reference.clone()
    sent = quantizer.decode(quantizer.encode(x, 5, Role.FEEDBACK, residual), x.shape)
    torch.testing.assert_close(sent + residual, x.float() + reference, rtol=0, atol=1e-5)
    moved, received = reference.clone(), reference.clone()
    wire = quantizer.encode(x, 5, Role.DELTA, moved)
    quantizer.add_to(received, wire)
    assert torch.equal(moved, received)
    assert float((received - x.float()).norm()) < 0.6 * float((reference - x.float()).norm())
    quantizer.add_to(received, wire, negative=True)
    torch.testing.assert_close(received, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [0, 5, 100, 128, 1000])
@pytest.mark.parametrize("options", [{"bits": 3.5, "group": 8}, {"bits": 2}, {"bits": 2.7, "group": 128}], ids=str)
def test_messages_of_rotated_numbers_decode_to_the_numbers(options: dict[str, Any], count: int) -> None:
    """Sums of several steps stay rotated in between; the last message is decoded without rotation."""
    quantizer, x = _quantizer(rotation=64, **options), _noise(count)
    coded = torch.Size((quantizer.coded(count),))
    wire = quantizer.encode(x, None)
    rotated = quantizer.plain.decode(wire, coded)
    assert quantizer.plain.nbytes(coded) == quantizer.nbytes(x.shape) == wire.numel()
    back = rotate(rotated, 64)[:count] if count else rotated
    torch.testing.assert_close(back, quantizer.decode(wire, x.shape), rtol=0, atol=1e-5)
    again = quantizer.decode(quantizer.plain.encode(rotated, None), x.shape)
    assert float((again - x).norm()) <= 0.75 * float(x.norm())


@pytest.mark.parametrize("options", TILED, ids=str)
def test_zeros_stay_zero_and_nan_stays_visible(options: dict[str, Any]) -> None:
    assert torch.equal(_round_trip(torch.zeros(300), 3, **options), torch.zeros(300))
    x = _noise(300)
    x[70] = torch.nan
    y = _round_trip(x, 3, **options)
    assert not torch.isfinite(y[64:80]).all()
    assert torch.isfinite(y[128:]).all()


@pytest.mark.parametrize("options", TILED[2:], ids=str)
def test_stochastic_rounding_is_unbiased(options: dict[str, Any]) -> None:
    x = _noise(128)
    mean = torch.stack([_round_trip(x, seed, **options) for seed in range(600)]).mean(dim=0)
    step = float(x.max() - x.min()) / 3
    assert float((mean - x).abs().max()) < 5 * step / 2 / 600**0.5
