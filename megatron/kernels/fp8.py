"""Matrix products of 8-bit floating-point numbers: scales, quantization, and the product.

A scale is a power of two, so that scaling by it rounds nothing, and codes and scales are the same bits on every device.
It is the smallest one that keeps the largest magnitude within the format's range, never less than the smallest normal
fp32 number. A maximum that is infinite or no number makes every number under its scale NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

EIGHT_BIT_UNITS = (8, 9)
"""Compute capability of the first GPUs that multiply 8-bit floating-point numbers."""

MULTIPLE = 16
"""Both sides of a factor must be multiples of this many numbers."""

_EXPONENT = 0x7F800000
_LAST_BIT = 23
_MOST_EXPONENT = {E4M3: 8, E5M2: 15}
"""Exponent of the largest number, which is 1.75 times a power of two in both formats."""
_UP_BEYOND_1_75 = 0x1FFFFF
"""Added to the bits of m * 2^e, carries into the exponent if m is above 1.75."""


class Quantized(NamedTuple):
    """A matrix of 8-bit numbers.

    Args:
        codes: the numbers, contiguous.
        scale: what they are multiplied by, fp32: of no dimension, or a column with one for each row.
    """

    codes: Tensor
    scale: Tensor


def largest(x_mn: Tensor, by_rows: bool) -> Tensor:
    """Largest magnitude, fp32: of the whole matrix (no dimension), or of each row (m, 1)."""
    return (x_mn.abs().amax(dim=1, keepdim=True) if by_rows else x_mn.abs().amax()).float()


def scale_of(most: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales for numbers of these largest magnitudes, fp32."""
    offset = _MOST_EXPONENT[dtype] << _LAST_BIT
    # By the bits: a division rounds, and differently on different devices.
    bits = (most.view(torch.int32) + _UP_BEYOND_1_75) & _EXPONENT
    scale = (bits.clamp(min=offset + (1 << _LAST_BIT)) - offset).view(torch.float32)
    return torch.where(most.isfinite(), scale, torch.nan)


def quantize(x_mn: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantized:
    """Rounds to the nearest 8-bit numbers, ties to even.

    Args:
        x_mn: the matrix, or a transposed view; the result is contiguous.
        scale: a scale of no dimension, or one for each row (m, 1), of magnitudes that are at least those of ``x_mn``.
        dtype: E4M3 or E5M2.
    """
    inverse = torch.where(scale.isfinite(), ((254 << _LAST_BIT) - scale.view(torch.int32)).view(torch.float32), scale)
    return Quantized((x_mn.float() * inverse).to(dtype).contiguous(), scale)


def fits(*sizes: int) -> bool:
    """Whether matrices of these sizes can be factors."""
    return all(size % MULTIPLE == 0 for size in sizes)


def scaled_product(a_mk: Quantized, b_nk: Quantized, bias_n: Tensor | None = None, fast: bool = False) -> Tensor:
    """``a b^T + bias`` in bf16, (m, n); by torch's matrix units on CUDA, else by ``reference_product``.

    Args:
        a_mk, b_nk: the factors, of one kind of scale; not both E5M2.
        bias_n: added before rounding.
        fast: on CUDA, add some of the products with fewer than fp32's bits.
    """
    if a_mk.codes.is_cuda:
        return units_product(a_mk, b_nk, bias_n, fast)
    return reference_product(a_mk, b_nk, bias_n)


def units_product(a_mk: Quantized, b_nk: Quantized, bias_n: Tensor | None, fast: bool) -> Tensor:
    """The same by torch's function for the matrix units of GPUs."""
    return torch._scaled_mm(
        a_mk.codes,
        b_nk.codes.t(),
        scale_a=a_mk.scale,
        scale_b=b_nk.scale.t(),
        bias=bias_n,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def reference_product(a_mk: Quantized, b_nk: Quantized, bias_n: Tensor | None = None) -> Tensor:
    """The same, from fp32 products of the 8-bit numbers."""
    product_mn = (a_mk.codes.float() @ b_nk.codes.float().t()) * a_mk.scale * b_nk.scale.t()
    return (product_mn if bias_n is None else product_mn + bias_n.float()).bfloat16()
