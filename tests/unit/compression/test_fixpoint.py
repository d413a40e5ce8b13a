"""Fixed-point numbers: packing, grids, error bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.kernels.reference import pack_bits, unpack_bits


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), count=st.integers(0, 70), seed=st.integers(0, 99))
def test_packing_is_lossless_for_any_width_and_length(bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (count,), generator=generator).to(torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.numel() == -(-count // 8) * bits
    assert torch.equal(unpack_bits(packed, bits, count), codes)
    stream = sum(int(code) << (bits * place) for place, code in enumerate(codes.tolist()))
    assert int.from_bytes(bytes(packed.tolist()), "little") == stream


def _round_trip(x: torch.Tensor, seed: int | None = None, **options: object) -> torch.Tensor:
    quantizer = Quantizer(FixpointConfig(**options))  # type: ignore[arg-type]
    wire = quantizer.encode(x, seed)
    assert wire.numel() == quantizer.nbytes(x.shape)
    return quantizer.decode(wire, x.shape)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    scale=st.sampled_from(["group", "channel", "tensor"]),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    magnitude=st.sampled_from([1e-30, 1e-7, 1.0, 1e20]),
    seed=st.integers(0, 99),
)
def test_the_error_is_at_most_half_a_step(bits: int, scale: str, shape: list[int], magnitude: float, seed: int) -> None:
    """At any magnitude: there is no epsilon under which gradients vanish, and no largest scale."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    y = _round_trip(x, bits=bits, scale=scale, group=8)
    step = float(x.abs().max()) / ((1 << (bits - 1)) - 1)
    assert float((y - x).abs().max()) <= step * 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_zero_stays_zero_and_both_peaks_are_reached(bits: int) -> None:
    assert torch.equal(_round_trip(torch.zeros(100), bits=bits), torch.zeros(100))
    x = torch.zeros(64)
    x[3], x[5] = 2.0, -2.0
    y = _round_trip(x, bits=bits)
    if bits > 1:
        torch.testing.assert_close(y, x)
        assert float(_round_trip(x, bits=bits, grid="asymmetric")[3]) == pytest.approx(2 - 2.0 ** (2 - bits))


@pytest.mark.parametrize(("bits", "error"), [(2, 0.505), (3, 0.252), (4, 0.126), (6, 0.031), (8, 0.0078)])
def test_the_asymmetric_channel_grid_has_the_published_error(bits: int, error: float) -> None:
    """Relative error on normal numbers, 1,024 tokens to a channel scale (bf16 scales would add to it)."""
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    y = _round_trip(x, bits=bits, scale="channel", grid="asymmetric")
    assert float((y - x).norm() / x.norm()) == pytest.approx(error, rel=0.05)


def test_groups_are_better_than_channels_at_few_bits() -> None:
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    grouped, channel = (_round_trip(x, bits=4, scale=scale) for scale in ("group", "channel"))
    assert float((grouped - x).norm()) < 0.85 * float((channel - x).norm())


def test_stochastic_rounding_is_unbiased_and_seeded() -> None:
    x = torch.linspace(-1, 1, 64)
    rounds = [_round_trip(x, seed=seed, bits=3, rounding="stochastic") for seed in range(400)]
    assert torch.equal(rounds[0], _round_trip(x, seed=0, bits=3, rounding="stochastic"))
    assert not torch.equal(rounds[0], rounds[1])
    step = 1 / 3
    bias = (torch.stack(rounds).mean(dim=0) - x).abs().max()
    assert float(bias) < 5 * step / 2 / math.sqrt(400)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.ones(130)
    x[70] = bad
    y = _round_trip(x, bits=4)
    assert not torch.isfinite(y[64:128]).all()
    torch.testing.assert_close(y[:64], x[:64])


def test_a_rotation_spreads_outliers() -> None:
    """One large number in each group: without the rotation its neighbors vanish."""
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
        ({"rotation": 48}, "power of two from 8 to 1024"),
        ({"rotation": 64, "scale": "channel"}, "use scale=group"),
        ({"rotation": 64, "group": 24}, "must be a power of two with a rotation"),
    ],
)
def test_grids_that_cannot_be_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        FixpointConfig(**options)  # type: ignore[arg-type]
