"""Fixed-point numbers: packing, grids, error bounds."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.compression import fixpoint
from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.kernels.grid import Grid
from megatron.kernels.reference import bf16_towards, pack_bits, unpack_bits


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), count=st.integers(0, 70), seed=st.integers(0, 99))
def test_packing_is_lossless_and_of_the_documented_layout(bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (count,), generator=generator).to(torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.numel() == -(-count // 8) * bits
    assert torch.equal(unpack_bits(packed, bits, count), codes)
    stream = sum(int(code) << (bits * index) for index, code in enumerate(codes.tolist()))
    assert int.from_bytes(bytes(packed.tolist()), "little") == stream


def _round_trip(x: torch.Tensor, seed: int | None = None, **options: Any) -> torch.Tensor:
    quantizer = Quantizer(FixpointConfig(**options))
    wire = quantizer.encode(x, seed)
    assert wire.numel() == quantizer.nbytes(x.shape)
    return quantizer.decode(wire, x.shape)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    grid=st.sampled_from(["symmetric", "minmax"]),
    scale=st.sampled_from(["group", "channel", "tensor"]),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    magnitude=st.sampled_from([1e-30, 1e-7, 1.0, 1e20]),
    seed=st.integers(0, 99),
)
def test_the_error_is_at_most_half_a_step(
    bits: int, grid: str, scale: str, shape: list[int], magnitude: float, seed: int
) -> None:
    """At any magnitude: no epsilon makes gradients vanish, and no scale is clipped."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    y = _round_trip(x, bits=bits, scale=scale, grid=grid, **({"group": 8} if scale == "group" else {}))
    if grid == "symmetric":
        step = float(x.abs().max()) / ((1 << (bits - 1)) - 1)
    else:
        step = float(x.max() - x.min()) / ((1 << bits) - 1)
    assert float((y - x).abs().max()) <= step * 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_zero_and_both_peaks_are_exact(bits: int) -> None:
    assert torch.equal(_round_trip(torch.zeros(100), bits=bits), torch.zeros(100))
    x = torch.zeros(64)
    x[3], x[5] = 2.0, -2.0
    y = _round_trip(x, bits=bits, grid="symmetric")
    if bits > 1:
        torch.testing.assert_close(y, x)
        assert float(_round_trip(x, bits=bits, grid="asymmetric")[3]) == pytest.approx(2 - 2.0 ** (2 - bits))


@pytest.mark.parametrize(("bits", "error"), [(2, 0.505), (3, 0.252), (4, 0.126), (6, 0.031), (8, 0.0078)])
def test_the_asymmetric_channel_grid_has_the_published_error(bits: int, error: float) -> None:
    """Relative error on normal numbers, 1,024 tokens to a channel scale (bf16 scales would add to it)."""
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    y = _round_trip(x, bits=bits, scale="channel", grid="asymmetric")
    assert float((y - x).norm() / x.norm()) == pytest.approx(error, rel=0.05)


def _groups(kind: str) -> torch.Tensor:
    """Groups of numbers of standard deviation 1 or with outliers, (4096, 64)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=generator)
    if kind == "normal":
        return x
    if kind == "tails":  # Student's t with 3 degrees of freedom
        return x / (torch.randn(4096, 64, 3, generator=generator).square().mean(dim=2)).sqrt()
    x[:, 7] *= 20  # a channel of outliers
    return x


def _errors(x: torch.Tensor, bits: int, rotation: int = 0) -> dict[str, float]:
    """Relative error of each grid with a single scale per group."""
    decoded = {grid: _round_trip(x, bits=bits, grid=grid, rotation=rotation) for grid in GRIDS}
    return {grid: float((y - x).norm() / x.norm()) for grid, y in decoded.items()}


GRIDS = ("symmetric", "asymmetric", "signed", "midrise", "auto")
MEASURED = {
    ("normal", 2, 0): (0.718, 0.411, 0.361, 0.341, 0.361),
    ("normal", 3, 0): (0.251, 0.200, 0.184, 0.189, 0.184),
    ("tails", 2, 0): (0.687, 0.536, 0.484, 0.548, 0.484),
    ("tails", 3, 0): (0.370, 0.314, 0.294, 0.410, 0.294),
    ("outlier", 2, 0): (0.357, 0.461, 0.330, 0.815, 0.330),
    ("outlier", 3, 0): (0.309, 0.330, 0.288, 0.699, 0.288),
    ("normal", 2, 64): (0.715, 0.410, 0.360, 0.339, 0.339),
    ("normal", 3, 64): (0.250, 0.200, 0.184, 0.188, 0.184),
    ("tails", 2, 64): (0.692, 0.387, 0.348, 0.322, 0.322),
    ("tails", 3, 64): (0.233, 0.186, 0.174, 0.175, 0.174),
    ("outlier", 2, 64): (0.568, 0.300, 0.290, 0.241, 0.241),
    ("outlier", 3, 64): (0.164, 0.135, 0.130, 0.125, 0.130),
}
"""Relative errors on 4,096 groups of 64 numbers, by distribution, bits and rotation; all grids take equal bytes."""


@pytest.mark.parametrize(("case", "errors"), MEASURED.items(), ids=str)
def test_grids_of_few_bits_have_the_documented_errors(case: tuple[str, int, int], errors: tuple[float, ...]) -> None:
    kind, bits, rotation = case
    measured = _errors(_groups(kind), bits, rotation)
    assert measured == pytest.approx(dict(zip(GRIDS, errors, strict=True)), abs=0.006)
    assert measured["auto"] < min(measured["symmetric"], measured["asymmetric"])
    assert measured["auto"] <= 1.07 * min(measured.values())


def test_the_default_grid_is_symmetric_except_at_two_and_three_bits() -> None:
    x = _groups("normal")
    for bits in (1, 4, 5, 8):
        assert torch.equal(_round_trip(x, bits=bits), _round_trip(x, bits=bits, grid="symmetric"))
    sign = _round_trip(x, bits=1)
    assert torch.equal(sign.abs(), x.abs().double().mean(dim=1, keepdim=True).float().expand_as(x))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_signed_grid_is_exact_at_peaks_of_either_sign_and_at_zero(bits: int, sign: float) -> None:
    x = torch.zeros(64)
    x[3], x[5] = 2.0 * sign, -1.0 * sign
    torch.testing.assert_close(_round_trip(x, bits=bits, grid="signed"), x)
    alone = _round_trip(x[:8] * torch.eye(8)[3], bits=bits, grid="signed", group=8)
    torch.testing.assert_close(alone, x[:8] * torch.eye(8)[3])


def test_rotating_outliers_alone_has_an_error_between_none_and_all() -> None:
    """On heavy-tailed numbers; blocks of normal numbers are hardly ever rotated."""
    x = _groups("tails")
    options: tuple[dict[str, Any], ...] = ({"rotation": 64}, {"rotation": 64, "rotate_when": "outlier"}, {})
    errors = [float((_round_trip(x, bits=4, **rotation) - x).norm() / x.norm()) for rotation in options]
    assert errors == pytest.approx([0.100, 0.145, 0.181], abs=0.006)
    normal = _groups("normal")
    same = (_round_trip(normal, bits=4, **options[1]) == _round_trip(normal, bits=4)).all(dim=1)
    assert 0.99 < float(same.float().mean()) < 1.0


def test_a_short_last_group_has_the_scale_of_its_numbers() -> None:
    """Means and root mean squares do not count the padding."""
    x = torch.full((70,), 3.0)
    for options in ({"bits": 1}, {"bits": 2, "scale_method": "l2", "grid": "symmetric"}, {"bits": 2}):
        y = _round_trip(x, **options)
        torch.testing.assert_close(y[64:], y[:6])


def test_minmax_fits_numbers_that_lie_far_from_zero() -> None:
    """A constant is exact, and the levels cover only the range."""
    constant = torch.full((64,), 7.3)
    assert torch.equal(_round_trip(constant, bits=2, grid="minmax"), constant)
    x = 100 + torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    errors = [float((_round_trip(x, bits=4, grid=grid) - x).norm()) for grid in ("minmax", "symmetric")]
    assert errors[0] < errors[1] / 20
    assert Quantizer(FixpointConfig(bits=4, grid="minmax")).nbytes(torch.Size((64, 64))) == 64 * (2 * 4 + 32)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rounded_limits_of_minmax_grids_enclose_all_numbers(dtype: str) -> None:
    """With stochastic rounding, clipping would be a bias."""
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)) + torch.linspace(-9, 9, 100).unsqueeze(1)
    quantizer = Quantizer(FixpointConfig(bits=8, grid="minmax", scale_dtype=dtype))  # type: ignore[arg-type]
    wire = quantizer.encode(x, None)
    limits = wire[: 200 * quantizer.scale_dtype.itemsize].view(quantizer.scale_dtype).view(100, 2).float()
    assert bool((limits[:, 0] <= x.amin(dim=1)).all())
    assert bool((limits[:, 1] >= x.amax(dim=1)).all())
    torch.testing.assert_close(limits, torch.stack([x.amin(dim=1), x.amax(dim=1)], dim=1), rtol=2**-7, atol=0)


@pytest.mark.parametrize("kind", ["normal", "tails"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_a_bf16_scale_rounded_to_nearest_has_less_error_than_rounded_up(kind: str, bits: int) -> None:
    """A clipped peak loses less than longer steps cost all other numbers: compared with a plain quantizer in fp64."""
    x, top = _groups(kind), (1 << (bits - 1)) - 1
    most = x.abs().amax(dim=1, keepdim=True)
    up = bf16_towards(most, most > 0).double()
    wide = x.double()
    error_up = float(((wide * top / up).round() * up / top - wide).norm())
    error = float((_round_trip(x, bits=bits, grid="symmetric", scale_dtype="bf16").double() - wide).norm())
    assert 1.001 < error_up / error < 1.009


def test_groups_are_better_than_channels_at_few_bits() -> None:
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    grouped, channel = (_round_trip(x, bits=4, scale=scale) for scale in ("group", "channel"))
    assert float((grouped - x).norm()) < 0.85 * float((channel - x).norm())


@pytest.mark.parametrize("grid", ["auto", "midrise", "minmax"])
def test_stochastic_rounding_is_seeded(grid: str) -> None:
    first, again, other = (
        _round_trip(torch.linspace(-1, 1, 64), seed=seed, bits=3, grid=grid, rounding="stochastic")
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("bits", "grid"), [(4, "auto"), (2, "auto"), (4, "minmax")])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_stay_visible_in_their_group(bad: float, bits: int, grid: str) -> None:
    x = torch.ones(130)
    x[70] = bad
    y = _round_trip(x, bits=bits, grid=grid)
    assert not torch.isfinite(y[64:128]).all()
    torch.testing.assert_close(y[:64], _round_trip(x[:64], bits=bits, grid=grid))
    assert torch.isfinite(y[:64]).all()


def test_a_rotation_spreads_outliers() -> None:
    """Beside a large number in each group, its neighbors would vanish without the rotation."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[:, 7] = 100.0
    plain, rotated = (_round_trip(x, bits=4, rotation=rotation) for rotation in (0, 64))
    assert float((rotated - x).norm()) < 0.8 * float((plain - x).norm())
    small = [(y - x)[:, :7].norm() / x[:, :7].norm() for y in (plain, rotated)]
    assert float(small[0]) > 0.95


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": 12}, "multiple of 8; use 16"),
        ({"group": 32, "scale": "channel"}, "group=32: means nothing with scale=channel; .* or leave group out"),
        ({"group": 32, "scale": "tensor"}, "group=32: means nothing with scale=tensor"),
        ({"grid": "signed", "bits": 1}, "use 2, or leave grid out"),
        ({"grid": "minmax", "scale_method": "l2"}, "leave scale-method out"),
        ({"rotation": 48}, "power of two from 8 to 1024"),
        ({"rotation": 64, "scale": "channel"}, "use scale=group"),
        ({"rotation": 64, "group": 24}, "must be a power of two with a rotation"),
        ({"bits": 3.8, "scale": "channel"}, "use scale=group, or bits=3"),
        ({"bits": 3.01}, "takes 1/64 of a bit, .* use bits=3, or at least 3.03125"),
        ({"rotate_when": "outlier"}, "there is no rotation; add rotation=64"),
        ({"rotation": 64, "outlier_ratio": 3.0}, "outlier-ratio=3: .*add rotate-when=outlier"),
    ],
)
def test_invalid_grids_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        FixpointConfig(**options)


def test_the_layout_of_a_message_is_computed_once() -> None:
    """For short messages the layout would take as long as the coding."""
    quantizer, x = Quantizer(FixpointConfig(bits=4)), torch.ones(24)
    with patch.object(fixpoint, "Grid", wraps=Grid) as constructor:
        for _ in range(2):
            quantizer.add_to(x, quantizer.encode(x, None))
    assert constructor.call_count == 1
