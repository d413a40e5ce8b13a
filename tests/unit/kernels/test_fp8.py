"""8-bit products on the CPU: scales, codes and sums against an emulation of the formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.kernels import fp8

FORMATS = [fp8.E4M3, fp8.E5M2]
BITS = {fp8.E4M3: (4, 3, 448.0), fp8.E5M2: (5, 2, 57344.0)}
"""Bits of exponent and mantissa, and the largest number."""


def numbers(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a format in ascending order, with a single zero."""
    exponents, mantissas, most = BITS[dtype]
    bias, steps = 2 ** (exponents - 1) - 1, 2**mantissas
    magnitudes = {
        math.ldexp(m / steps, 1 - bias) if e == 0 else math.ldexp(1 + m / steps, e - bias)
        for e in range(2**exponents)
        for m in range(steps)
    }
    finite = sorted(x for x in magnitudes if x <= most)
    return torch.tensor([-x for x in finite[:0:-1]] + finite, dtype=torch.float64)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest numbers of a format, ties to even."""
    grid = numbers(dtype)
    high = torch.searchsorted(grid, x.double().contiguous()).clamp(1, len(grid) - 1)
    below, above = grid[high - 1], grid[high]
    middle = (below + above) / 2
    # From zero on, the numbers of a format are alternately even and odd.
    even_above = (high - len(grid) // 2) % 2 == 0
    return torch.where((x > middle) | ((x == middle) & even_above), above, below)


def scale(most: float, dtype: torch.dtype) -> float:
    """Smallest power of two that keeps a magnitude within the range of the format."""
    power = -126
    while math.ldexp(BITS[dtype][2], power) < most:
        power += 1
    return math.ldexp(1.0, power)


def noise(m: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_scale_is_the_smallest_sufficient_power_of_two(dtype: torch.dtype) -> None:
    top = BITS[dtype][2]
    powers = [math.ldexp(top, k) for k in (-140, -126, -10, 0, 9)]
    values = [0.0, 1e-45, 1e-38, 1.0, 3.4e38, *powers, *(x * (1 + 2**-23) for x in powers), *(x * 0.9 for x in powers)]
    most = torch.tensor(values)
    assert fp8.scale_of(most, dtype).tolist() == [scale(x, dtype) for x in most.tolist()]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("by_rows", [False, True])
def test_codes_are_the_nearest_numbers(dtype: torch.dtype, by_rows: bool) -> None:
    x = noise(48, 64).float() * torch.logspace(-9, 3, 48).unsqueeze(1)
    x[5] = 0.0
    ties = (numbers(dtype)[:-1] + numbers(dtype)[1:]) / 2
    x[6], x[7] = ties[:64].float(), ties[-64:].float()
    most = fp8.largest(x, by_rows)
    assert torch.equal(most, x.abs().amax(1, keepdim=True) if by_rows else x.abs().amax())
    quantized = fp8.quantize(x, fp8.scale_of(most, dtype), dtype)
    expected_scale = torch.tensor([[scale(float(m), dtype)] for m in most.flatten()]) if by_rows else quantized.scale
    assert torch.equal(quantized.scale, expected_scale)
    assert torch.equal(quantized.codes.double(), nearest(x.double() / expected_scale.double(), dtype))
    assert quantized.codes.dtype == dtype


def test_codes_of_a_transposed_view_are_contiguous() -> None:
    x = noise(32, 48)
    quantized = fp8.quantize(x.t(), fp8.scale_of(fp8.largest(x.t(), True), fp8.E4M3), fp8.E4M3)
    assert quantized.codes.is_contiguous()
    assert quantized.codes.shape == (48, 32)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_stay_visible(bad: float, by_rows: bool) -> None:
    a, b = noise(32, 32, 1), noise(16, 32, 2)
    a[3, 4] = bad
    qa, qb = (fp8.quantize(x, fp8.scale_of(fp8.largest(x, by_rows), fp8.E4M3), fp8.E4M3) for x in (a, b))
    out = fp8.scaled_product(qa, qb)
    assert out[3].isnan().all()
    assert out.isfinite().all(dim=1).tolist() == [by_rows and row != 3 for row in range(32)]


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-100, 1.0, 2.0**100])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_products_are_those_of_the_codes(dtype: torch.dtype, by_rows: bool, magnitude: float) -> None:
    a, b, bias = noise(48, 64, 1) * magnitude, noise(32, 64, 2), noise(1, 32, 3)[0] * magnitude
    qa = fp8.quantize(a, fp8.scale_of(fp8.largest(a, by_rows), dtype), dtype)
    qb = fp8.quantize(b, fp8.scale_of(fp8.largest(b, by_rows), fp8.E4M3), fp8.E4M3)
    product = (qa.codes.double() * qa.scale) @ (qb.codes.double() * qb.scale).t()
    for addend in (None, bias):
        out = fp8.scaled_product(qa, qb, addend)
        exact = product if addend is None else product + addend.double()
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, rtol=2.0**-8, atol=1e-5 * magnitude)


@pytest.mark.parametrize("by_rows", [False, True])
def test_torchs_cpu_product_gives_the_same_numbers(by_rows: bool) -> None:
    """With the layout of scales and factors of the CUDA product."""
    a, b, bias = noise(48, 64, 1), noise(32, 64, 2), noise(1, 32, 3)[0]
    qa, qb = (fp8.quantize(x, fp8.scale_of(fp8.largest(x, by_rows), fp8.E4M3), fp8.E4M3) for x in (a, b))
    expected = fp8.scaled_product(qa, qb, bias)
    if by_rows and torch.__version__ < "2.12":  # per-tensor scales only
        with pytest.raises(RuntimeError, match="per-tensor scaling"):
            fp8.units_product(qa, qb, bias, fast=True)
        return
    actual = fp8.units_product(qa, qb, bias, fast=True)
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=1e-3)


def test_supported_sizes() -> None:
    assert fp8.fits(16, 32, 480)
    assert not fp8.fits(16, 24)
