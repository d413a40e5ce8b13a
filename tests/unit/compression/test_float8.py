"""8-bit floats: error bounds, bytes, and errors beside those of fixed point."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.float8 import Float8Config, Float8Format
from megatron.compression.message import Format

SHARES = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
"""Largest relative error of a number."""


def _sent(form: Format, x: Tensor, seed: int | None = None) -> Tensor:
    wire = torch.full((form.nbytes(x.shape),), 77, dtype=torch.uint8)
    form.encode(x, seed, wire=wire)
    return form.decode(wire, x.shape)


def _round_trip(x: Tensor, seed: int | None = None, **options: object) -> Tensor:
    return _sent(Float8Format(Float8Config(**options)), x, seed)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(["e4m3", "e5m2"]),
    scale=st.sampled_from(["tile", "row", "tensor"]),
    dtype=st.sampled_from(["fp32", "bf16", "e8m0"]),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    magnitude=st.sampled_from([1e-30, 1e-7, 1.0, 1e20, 1e37]),
    seed=st.integers(0, 99),
)
def test_the_relative_error_is_bounded(
    kind: str, scale: str, dtype: str, shape: list[int], magnitude: float, seed: int
) -> None:
    """Down to 2^-13 of the largest number, at any magnitude. A bf16 scale may be too small by 2^-9."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    tile = {"tile": 8} if scale == "tile" else {}
    y = _round_trip(x, format=kind, scale=scale, scale_dtype=dtype, **tile)
    floor = float(x.abs().max()) * 2.0**-13
    assert bool(((y - x).abs() <= (SHARES[kind] * 1.0001) * x.abs().clamp(min=floor)).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e8m0"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_zero_and_the_peak_are_exact(kind: str, dtype: str) -> None:
    assert not _round_trip(torch.zeros(300), format=kind, scale_dtype=dtype).any()
    x = torch.zeros(300)
    x[3], x[5], x[200] = 1.7, -1.7, 3e-20
    y = _round_trip(x, format=kind, scale_dtype=dtype)
    nearest = {"fp32": 1e-6, "bf16": 2.0**-8, "e8m0": SHARES[kind]}[dtype]
    torch.testing.assert_close(y, x, rtol=nearest, atol=0)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, 8 + 32 / 128),
        ({"scale": "row"}, 8 + 32 / 1024),
        ({"scale": "tensor"}, 8 + 32 / 2**16),
        ({"tile": 32, "scale_dtype": "e8m0"}, 8 + 8 / 32),
        ({"tile": 256, "scale_dtype": "bf16", "format": "e5m2"}, 8 + 16 / 256),
    ],
)
def test_bytes_are_those_of_the_formula(options: dict[str, object], bits: float) -> None:
    form = Float8Format(Float8Config(**options))  # type: ignore[arg-type]
    assert form.nbytes(torch.Size((64, 1024))) == 2**16 * bits / 8
    assert form.nbytes(torch.Size((0,))) == 0


def _errors(form: Format, x: Tensor) -> tuple[float, float, float]:
    """Relative norm of the error, median relative error, and share of numbers that vanish."""
    y = _sent(form, x)
    error = (y - x).abs()
    median = float((error / x.abs()).median())
    return float(error.norm() / x.norm()), median, float((y == 0).float().mean())


def _about(figure: float) -> object:
    return pytest.approx(figure, rel=0.06)


def test_fixed_point_is_better_without_outliers_and_float8_with_them() -> None:
    """The figures of docs/reference/compressors/float8.md."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    spiked = x.clone()
    spiked.view(-1, 128)[:, 5] *= 100
    fixpoint, e4m3, e5m2 = Quantizer(FixpointConfig()), *(Float8Format(Float8Config(format=f)) for f in SHARES)  # type: ignore[arg-type]
    assert _errors(fixpoint, x)[0] == _about(0.006)
    assert _errors(e4m3, x)[:2] == (_about(0.026), _about(0.022))
    assert _errors(e5m2, x)[:2] == (_about(0.051), _about(0.043))
    assert _errors(fixpoint, spiked) == (_about(0.018), _about(0.025), _about(0.12))
    assert _errors(e4m3, spiked)[:2] == (_about(0.003), _about(0.022))
    assert _errors(e4m3, spiked)[2] < 1e-3
    assert _errors(e5m2, spiked) == (_about(0.006), _about(0.043), 0.0)


def test_stochastic_rounding_of_small_and_large_numbers_is_unbiased_and_seeded() -> None:
    x = torch.cat([torch.linspace(-1, 1, 64), torch.linspace(-1e-4, 1e-4, 64)])
    for kind, share in SHARES.items():
        rounds = [_round_trip(x, seed=seed, format=kind, rounding="stochastic") for seed in range(400)]
        assert torch.equal(rounds[0], _round_trip(x, seed=0, format=kind, rounding="stochastic"))
        assert not torch.equal(rounds[0], rounds[1])
        bias = (torch.stack(rounds).double().mean(dim=0) - x).abs()
        least = 2.0**-9 / 448 if kind == "e4m3" else 2.0**-16 / 57344
        step = (2 * share * x.abs()).clamp(min=least)
        assert bool((bias < 5 * step / 2 / math.sqrt(400)).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e8m0"])
def test_non_finite_numbers_stay_visible_in_their_tile(bad: float, dtype: str) -> None:
    x = torch.ones(300)
    x[130] = bad
    y = _round_trip(x, scale_dtype=dtype)
    assert y[128:256].isnan().all()
    torch.testing.assert_close(y[:128], x[:128], rtol=SHARES["e4m3"], atol=0)


def test_messages_may_be_unaligned() -> None:
    """As in a gathered buffer; the padding to 4 bytes is zero."""
    form = Float8Format(Float8Config(scale_dtype="bf16"))
    x = torch.randn(333, generator=torch.Generator().manual_seed(0))
    room = torch.full((form.nbytes(x.shape) + 3,), 77, dtype=torch.uint8)
    room[3:] = form.encode(x, None, wire=room[3:].clone())
    assert room.numel() == 3 + 3 * 2 + 333 + 1
    assert room[-1] == 0
    assert torch.equal(form.decode(room[3:], x.shape), _round_trip(x, scale_dtype="bf16"))


@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_a_tile_without_scale_of_tiles_is_refused(scale: str) -> None:
    with pytest.raises(
        UserError, match=f"tile=32: means nothing with scale={scale}; use scale=tile, or leave tile out"
    ):
        Float8Config(scale=scale, tile=32)  # type: ignore[arg-type]
    assert Float8Config(tile=32).tile == 32
