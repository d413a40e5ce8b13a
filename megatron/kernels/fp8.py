"""FP8 matrix products: scales, quantization, and the product.

A scale is a power of two, so that scaling is exact, and codes and scales have the same bits on every device. It is the
smallest power of two that keeps the largest magnitude within the format's range, and at least the smallest normal fp32
number. With an infinite or NaN maximum, all numbers under the scale become NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

EIGHT_BIT_UNITS = (8, 9)
"""Lowest compute capability with FP8 matrix units."""

MULTIPLE = 16
"""Both dimensions of a factor must be multiples of this."""

_EXPONENT = 0x7F800000
_LAST_BIT = 23
_MAX_EXPONENT = {E4M3: 8, E5M2: 15}
"""Exponents of the formats' largest numbers, both 1.75 times a power of two."""
_UP_BEYOND_1_75 = 0x1FFFFF
"""When added to the bits of m * 2^e, carries into the exponent if m is above 1.75."""


class Quantized(NamedTuple):
    """A matrix of 8-bit numbers with scales.

    Args:
        codes: the 8-bit numbers, contiguous.
        scale: factors of the codes, fp32: a scalar tensor, or a column with a scale for each row.
    """

    codes: Tensor
    scale: Tensor


def largest(x_mn: Tensor, by_rows: bool) -> Tensor:
    """Largest magnitude, fp32: of the whole matrix (scalar), or of each row (m, 1)."""
    return (x_mn.abs().amax(dim=1, keepdim=True) if by_rows else x_mn.abs().amax()).float()


def scale_of(most: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales for the given largest magnitudes, fp32."""
    offset = _MAX_EXPONENT[dtype] << _LAST_BIT
    # Computed on the bits, because a division rounds, differently on different devices.
    bits = (most.view(torch.int32) + _UP_BEYOND_1_75) & _EXPONENT
    scale = (bits.clamp(min=offset + (1 << _LAST_BIT)) - offset).view(torch.float32)
    return torch.where(most.isfinite(), scale, torch.nan)


def quantize(x_mn: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantized:
    """Round to the nearest 8-bit numbers, ties to even.

    Args:
        x_mn: the matrix, or a transposed view; the result is contiguous.
        scale: a scalar scale, or a scale for each row (m, 1), for magnitudes at least as large as those of ``x_mn``.
        dtype: E4M3 or E5M2.
    """
    inverse = torch.where(scale.isfinite(), ((254 << _LAST_BIT) - scale.view(torch.int32)).view(torch.float32), scale)
    return Quantized((x_mn.float() * inverse).to(dtype).contiguous(), scale)


def fits(*sizes: int) -> bool:
    """Whether matrices of these sizes can be factors."""
    return all(size % MULTIPLE == 0 for size in sizes)


def scaled_product(a_mk: Quantized, b_nk: Quantized, bias_n: Tensor | None = None, fast: bool = False) -> Tensor:
    """``a b^T + bias`` in bf16, (m, n), with ``units_product`` on CUDA, else ``reference_product``.

    Args:
        a_mk, b_nk: the factors, with the same kind of scale; not both E5M2.
        bias_n: added before rounding.
        fast: on CUDA, accumulate partially at lower precision than fp32.
    """
    if a_mk.codes.is_cuda:
        return units_product(a_mk, b_nk, bias_n, fast)
    return reference_product(a_mk, b_nk, bias_n)


def units_product(a_mk: Quantized, b_nk: Quantized, bias_n: Tensor | None, fast: bool) -> Tensor:
    """``scaled_product`` on the FP8 matrix units of GPUs."""
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
    """``scaled_product`` by fp32 products of the 8-bit numbers."""
    product_mn = (a_mk.codes.float() @ b_nk.codes.float().t()) * a_mk.scale * b_nk.scale.t()
    return (product_mn if bias_n is None else product_mn + bias_n.float()).bfloat16()
