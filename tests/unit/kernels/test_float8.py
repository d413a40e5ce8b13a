"""Kernels of 8-bit floats against the reference implementation on the CPU; tests/gpu runs these checks on CUDA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.kernels import float8, native, ops
from megatron.kernels.float8 import Float8
from tests.support import float8 as checks
from tests.support.kernels import DTYPES, need_kernels, noise, spoil

pytestmark = need_kernels
DEVICE = "cpu"


@pytest.fixture(autouse=True)
def _compiled() -> None:
    """The reference implementations must not replace the kernels."""
    assert native.problem() is None


@pytest.mark.parametrize("mantissa", checks.MANTISSAS)
def test_codes_are_those_of_torch(mantissa: int) -> None:
    checks.check_codes(DEVICE, mantissa)


def test_every_format_gives_the_reference_bits() -> None:
    checks.check_formats(DEVICE, (0, 1, 39, 1000, 5000))


def test_large_groups_and_views_give_the_reference_bits() -> None:
    checks.check_large_groups(DEVICE)
    checks.check_unaligned(DEVICE)


@settings(max_examples=200, deadline=None)
@given(
    mantissa=st.sampled_from(checks.MANTISSAS),
    group=st.integers(1, 300),
    scale=st.sampled_from(checks.SCALES),
    count=st.integers(0, 700),
    dtype=st.sampled_from(DTYPES),
    power=st.integers(-150, 127),
    seed=st.integers(0, 99),
)
def test_special_numbers_give_the_reference_bits(
    mantissa: int, group: int, scale: torch.dtype, count: int, dtype: torch.dtype, power: int, seed: int
) -> None:
    """Zeros of both signs, NaN, infinities, subnormal and huge numbers."""
    x = checks.noise((count,), seed, DEVICE) * 2.0**power
    checks.check(spoil(x, seed).to(dtype), Float8(mantissa, group), scale, seed if seed % 2 else None)
    checks.check(x.nan_to_num(0.0).to(dtype), Float8(mantissa, group), scale)


def test_codes_do_not_depend_on_threads() -> None:
    x = noise((200_000,), 0, DEVICE)
    for group in (128, 50_000):
        outputs = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            codes, scales = checks.message(x.numel(), Float8(3, group), torch.float32, DEVICE)
            ops.float8_encode(x, codes, scales, Float8(3, group))
            outputs.append((codes, scales))
        assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("use_reference", [False, True])
@pytest.mark.parametrize("scale", checks.SCALES)
@pytest.mark.parametrize("mantissa", checks.MANTISSAS)
def test_finite_numbers_stay_finite_and_others_spoil_their_group(
    mantissa: int, scale: torch.dtype, use_reference: bool
) -> None:
    """From the smallest to the largest numbers of fp32."""
    encode, decode = (
        (float8.float8_encode, float8.float8_decode) if use_reference else (ops.float8_encode, ops.float8_decode)
    )
    form = Float8(mantissa, 4)
    most, least = torch.finfo(torch.float32).max, 2.0**-149
    rows = torch.tensor([[most, -most, 1.0, 0.0], [least, -least, 0.0, -0.0], [0.0, -0.0, 0.0, 0.0]])
    bad = torch.tensor([[1.0, torch.nan, 0.0, 2.0], [torch.inf, 1.0, 0.0, most], [0.0, 0.0, 0.0, -torch.inf]])
    x = torch.cat([rows, bad]).view(-1)
    codes, scales = checks.message(x.numel(), form, scale, DEVICE)
    encode(x, codes, scales, form, None)
    y = torch.empty_like(x)
    decode(codes, scales, y, form, 0)
    y_gn = y.view(6, 4)
    assert y_gn[:3].isfinite().all()
    assert y_gn[3:].isnan().all()
    assert y_gn[0, 0] >= most * (1 - 2.0**-mantissa)
    assert not y_gn[2].any()
    assert torch.equal(y_gn[:3, 0], -y_gn[:3, 1])
