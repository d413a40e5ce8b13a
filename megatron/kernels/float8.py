"""8-bit floats with shared scales: parameters of the kernels, and their pure-torch twins."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.reference import bf16_towards, noise

LEAST_UNIT = 2.0**-126
"""Codes are multiplied by no less, so that neither this nor its inverse is zero or infinite."""

_NAN = 0x7F


@dataclass(frozen=True)
class Float8:
    """8-bit floats, scaled so that the largest magnitude of each group is the largest number.

    Args:
        mantissa: bits of it. 3 is e4m3, without infinities; 2 is e5m2.
        group: consecutive numbers that share a scale.
    """

    mantissa: int
    group: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of the codes."""
        return torch.float8_e4m3fn if self.mantissa == 3 else torch.float8_e5m2

    @property
    def most(self) -> float:
        """The largest number."""
        return torch.finfo(self.dtype).max

    @property
    def top_power(self) -> int:
        """The largest exponent, plus 127, of a power of two that the largest number can be multiplied by in fp32."""
        return 254 - int(math.log2(self.most))

    def scale_count(self, count: int) -> int:
        """Scales of ``count`` numbers."""
        return -(-count // self.group)


def float8_encode(x: Tensor, codes: Tensor, scales: Tensor, form: Float8, seed: int | None) -> None:
    """Encodes numbers as 8-bit floats.

    Args:
        x: contiguous, any shape.
        codes: uint8, one for each number; written. NaN is 0x7f.
        scales: fp32, bf16 or uint8, ``form.scale_count`` long; written. fp32 and bf16 hold each group's largest
            magnitude; uint8 (e8m0) the exponent, plus 127, of the least power of two by which the format reaches it,
            and 255 is NaN. Codes are made with what it holds after rounding, and saturate: no finite number becomes
            infinite. All numbers of a group with an infinite or NaN one decode to NaN.
        form: the format.
        seed: seed of stochastic rounding (unbiased); None rounds to nearest, ties to even.
    """
    given_n = x.reshape(-1).float()
    if not given_n.numel():
        return
    groups = form.scale_count(given_n.numel())
    padded_n = torch.nn.functional.pad(given_n, (0, groups * form.group - given_n.numel()))
    largest_g = padded_n.view(groups, form.group).abs().amax(dim=1)
    if scales.dtype == torch.uint8:
        powers_g = ((_unit(largest_g, form).view(torch.int32) + 0x7FFFFF) >> 23).clamp(max=form.top_power)
        scales.copy_(torch.where(largest_g.isfinite(), powers_g, 255))
    else:
        outer = seed is not None and scales.dtype == torch.bfloat16
        rounded_g = bf16_towards(largest_g, largest_g > 0) if outer else largest_g.to(scales.dtype)
        highest = torch.full_like(rounded_g, torch.finfo(scales.dtype).max)
        scales.copy_(torch.where(largest_g.isfinite(), torch.minimum(rounded_g, highest), rounded_g))
    steps_n = _spread(torch.ones_like(largest_g) / _units(scales, form), given_n.numel(), form)
    scaled_n = (given_n * steps_n).clamp(-form.most, form.most)
    if seed is not None:
        scaled_n = _rounded(scaled_n, form, seed)
    codes_n = scaled_n.to(form.dtype).view(torch.uint8)
    codes.copy_(torch.where(scaled_n.isnan(), _NAN, codes_n))


def _rounded(scaled_n: Tensor, form: Float8, seed: int) -> Tensor:
    """One of the two 8-bit floats next to each number, stochastically."""
    least = torch.finfo(form.dtype).smallest_normal
    exponent_n = torch.frexp(scaled_n.abs().clamp(min=least)).exponent - 1
    step_n = torch.ldexp(torch.ones_like(scaled_n), exponent_n - form.mantissa)
    digits = 2.0 ** (23 - form.mantissa)
    drawn_n = (noise(scaled_n.numel(), seed, scaled_n.device) * digits).floor() / digits
    return torch.copysign((scaled_n.abs() / step_n + drawn_n).floor() * step_n, scaled_n)


def float8_decode(codes: Tensor, scales: Tensor, out: Tensor, form: Float8, added: int) -> None:
    """Decodes what ``float8_encode`` made.

    Args:
        codes, scales: as it wrote them.
        out: where the numbers go.
        form: the encoder's.
        added: 0 writes them, 1 adds them in fp32, -1 subtracts them.
    """
    if not out.numel():
        return
    values_n = codes.view(form.dtype).float() * _spread(_units(scales, form), codes.numel(), form)
    if added:
        out.add_(values_n.view(out.shape), alpha=added)
    else:
        out.copy_(values_n.view(out.shape))


def _unit(largest_g: Tensor, form: Float8) -> Tensor:
    """What makes the largest number of the format the largest magnitude of a group."""
    # CUDA divides a tensor by a number as a product with its reciprocal, which rounds twice.
    return largest_g.clamp(min=form.most * LEAST_UNIT) / torch.full_like(largest_g, form.most)


def _units(scales: Tensor, form: Float8) -> Tensor:
    """What the codes of each group are multiplied by, fp32."""
    if scales.dtype == torch.uint8:
        return scales.view(torch.float8_e8m0fnu).float()
    return _unit(scales.float(), form)


def _spread(unit_g: Tensor, count: int, form: Float8) -> Tensor:
    """The unit of each of ``count`` numbers."""
    return unit_g.repeat_interleave(form.group)[:count]
