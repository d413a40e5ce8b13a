"""8-bit floats with shared scales: parameters of the kernels, and their pure-torch reference implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.reference import bf16_towards, noise

MIN_UNIT = 2.0**-126
"""Smallest unit that codes are multiplied by, so that neither the unit nor its inverse is zero or infinite."""

_NAN = 0x7F


@dataclass(frozen=True)
class Float8:
    """Format of 8-bit floats, scaled so that the largest magnitude of each group maps to the format's largest number.

    Args:
        mantissa: mantissa bits: 3 for e4m3, without infinities; 2 for e5m2.
        group: consecutive numbers that share a scale.
    """

    mantissa: int
    group: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the codes."""
        return torch.float8_e4m3fn if self.mantissa == 3 else torch.float8_e5m2

    @property
    def most(self) -> float:
        """Largest number of the format."""
        return torch.finfo(self.dtype).max

    def scale_count(self, count: int) -> int:
        """Number of scales for ``count`` numbers."""
        return -(-count // self.group)


def float8_encode(x: Tensor, codes: Tensor, scales: Tensor, form: Float8, seed: int | None) -> None:
    """Encode numbers as 8-bit floats.

    Args:
        x: contiguous, any shape.
        codes: output, uint8, as many as numbers. NaN is 0x7f.
        scales: output, fp32, bf16 or uint8, ``form.scale_count`` long. fp32 and bf16 scales are each group's largest
            magnitude; a uint8 scale (e8m0) is the exponent, plus 127, of the smallest power of two with which the
            format reaches it, and 255 is NaN. Codes use the rounded scales and saturate: no finite number becomes
            infinite. All numbers of a group with an infinite or NaN number decode to NaN.
        form: the format.
        seed: seed of stochastic rounding (unbiased); None rounds to nearest, ties to even.
    """
    input_n = x.reshape(-1).float()
    if not input_n.numel():
        return
    groups = form.scale_count(input_n.numel())
    padded_n = torch.nn.functional.pad(input_n, (0, groups * form.group - input_n.numel()))
    largest_g = padded_n.view(groups, form.group).abs().amax(dim=1)
    if scales.dtype == torch.uint8:
        # Biased exponent of the largest power of two whose product with the largest number is finite in fp32.
        top_power = 254 - int(math.log2(form.most))
        powers_g = ((_unit(largest_g, form).view(torch.int32) + 0x7FFFFF) >> 23).clamp(max=top_power)
        scales.copy_(torch.where(largest_g.isfinite(), powers_g, 255))
    else:
        outer = seed is not None and scales.dtype == torch.bfloat16
        rounded_g = bf16_towards(largest_g, largest_g > 0) if outer else largest_g.to(scales.dtype)
        highest = torch.full_like(rounded_g, torch.finfo(scales.dtype).max)
        scales.copy_(torch.where(largest_g.isfinite(), torch.minimum(rounded_g, highest), rounded_g))
    steps_n = _spread(torch.ones_like(largest_g) / _units(scales, form), input_n.numel(), form)
    scaled_n = (input_n * steps_n).clamp(-form.most, form.most)
    if seed is not None:
        least = torch.finfo(form.dtype).smallest_normal
        exponent_n = torch.frexp(scaled_n.abs().clamp(min=least)).exponent - 1
        step_n = torch.ldexp(torch.ones_like(scaled_n), exponent_n - form.mantissa)
        digits = 2.0 ** (23 - form.mantissa)
        drawn_n = (noise(scaled_n.numel(), seed, scaled_n.device) * digits).floor() / digits
        scaled_n = torch.copysign((scaled_n.abs() / step_n + drawn_n).floor() * step_n, scaled_n)
    codes_n = scaled_n.to(form.dtype).view(torch.uint8)
    codes.copy_(torch.where(scaled_n.isnan(), _NAN, codes_n))


def float8_decode(codes: Tensor, scales: Tensor, out: Tensor, form: Float8, added: int) -> None:
    """Decode numbers encoded by ``float8_encode``.

    Args:
        codes, scales: outputs of ``float8_encode``.
        out: output tensor.
        form: the encoder's format.
        added: 0 overwrites ``out``, 1 adds to it in fp32, -1 subtracts from it.
    """
    if not out.numel():
        return
    values_n = codes.view(form.dtype).float() * _spread(_units(scales, form), codes.numel(), form)
    if added:
        out.add_(values_n.view(out.shape), alpha=added)
    else:
        out.copy_(values_n.view(out.shape))


def _unit(largest_g: Tensor, form: Float8) -> Tensor:
    """Factor from the largest number of the format to the largest magnitude of a group."""
    # CUDA computes tensor / scalar as a product with the reciprocal, which rounds twice.
    return largest_g.clamp(min=form.most * MIN_UNIT) / torch.full_like(largest_g, form.most)


def _units(scales: Tensor, form: Float8) -> Tensor:
    """Factors from codes to numbers for each group, fp32."""
    if scales.dtype == torch.uint8:
        return scales.view(torch.float8_e8m0fnu).float()
    return _unit(scales.float(), form)


def _spread(unit_g: Tensor, count: int, form: Float8) -> Tensor:
    """Expand units of groups to ``count`` numbers."""
    return unit_g.repeat_interleave(form.group)[:count]
