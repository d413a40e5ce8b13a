"""8-bit floats with shared scales, a format for numbers of different magnitudes within a group.

The error of a fixed-point code is half a step of its group's grid, regardless of the number's magnitude. The error of a
float is relative to the number, 1/16 for e4m3 and 1/8 for e5m2, down to 2^-14 and 2^-29 of the group's largest number.
Scales are fp32, bf16, or powers of two (e8m0; with tile=32 the MXFP8 of the OCP microscaling specification).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.ladder import Rung
from megatron.compression.message import Format, FormatCodec, ScaledCodes
from megatron.compression.options import MAX_SEED, opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.two_step import TwoStepSum
from megatron.kernels.float8 import Float8
from megatron.kernels.ops import float8_decode, float8_encode

_MANTISSAS = {"e4m3": 3, "e5m2": 2}
_SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.uint8}


@dataclass(frozen=True)
class Float8Config:
    """8-bit floats, with a scale for each tile, row or tensor."""

    format: Literal["e4m3", "e5m2"] = opt("e4m3", "3 bits of mantissa, or 2 and a wider range")
    scale: Literal["tile", "row", "tensor"] = opt("tile", "what shares a scale")
    tile: int = opt(128, "values per tile, along the last dimension", minimum=8, maximum=1 << 20)
    scale_dtype: Literal["fp32", "bf16", "e8m0"] = opt(
        "fp32", "data type of the scales on the wire; e8m0: powers of two"
    )
    rounding: Literal["nearest", "stochastic"] = opt("nearest", "stochastic is unbiased, and seeded")
    seed: int = opt(714, "seed of stochastic rounding", minimum=0, maximum=MAX_SEED)

    def __post_init__(self) -> None:
        if self.tile != type(self).tile and self.scale != "tile":
            raise UserError(
                f"tile={self.tile}: means nothing with scale={self.scale}; use scale=tile, or leave tile out"
            )


class Float8Format(Format):
    """Stateless format of 8-bit floats. 64-bit inputs are first cast to fp32."""

    def __init__(self, config: Float8Config) -> None:
        self.config = config

    def _form(self, shape: torch.Size) -> Float8:
        count = shape.numel()
        row = shape[-1] if len(shape) else 1
        group = {"tile": self.config.tile, "row": row, "tensor": count}[self.config.scale]
        return Float8(_MANTISSAS[self.config.format], max(min(group, count), 1))

    def _layout(self, form: Float8, count: int) -> ScaledCodes:
        return ScaledCodes((form.scale_count(count),), _SCALES[self.config.scale_dtype], (count,))

    def nbytes(self, shape: torch.Size) -> int:
        """Size of a tensor's message in bytes."""
        return self._layout(self._form(shape), shape.numel()).nbytes

    def encode(self, x: Tensor, seed: int | None, *, wire: Tensor) -> Tensor:
        """Write the message, uint8, to ``wire``; ``seed`` is for the noise of stochastic rounding."""
        x = x.detach().contiguous()
        form = self._form(x.shape)
        (scales,), (codes,) = self._layout(form, x.numel()).to_write(wire)
        float8_encode(x.float() if x.dtype == torch.float64 else x, codes, scales, form, seed)
        return wire

    def decode(self, wire: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
        """Decode a message to fp32, or to ``out``; groups with nonfinite inputs are NaN."""
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=wire.device)
        self._decode(wire, out, 0)
        return out

    def add_to(self, out: Tensor, wire: Tensor, negative: bool = False) -> Tensor:
        """Add a decoded message to ``out`` (fp32 or fp64), or subtract it, in place."""
        self._decode(wire, out, -1 if negative else 1)
        return out

    def _decode(self, wire: Tensor, out: Tensor, added: int) -> None:
        form = self._form(out.shape)
        (scales,), (codes,) = self._layout(form, out.numel()).to_read(wire)
        float8_decode(codes, scales, out, form, added)


class Float8Codec(FormatCodec):
    """Codec of messages of 8-bit floats."""

    config: Float8Config

    def __init__(self, config: Float8Config | None = None) -> None:
        config = config or Float8Config()
        super().__init__(config, Float8Format(config))


class Float8Rounds(TwoStepSum):
    """Two-step all-reduce with messages of 8-bit floats, summed in fp32."""

    config: Float8Config

    def __init__(self, config: Float8Config | None = None) -> None:
        super().__init__(config or Float8Config())
        self.format = Float8Format(self.config)


_LADDER = {Point.PP_FWD: (Rung("", {250: (-0.017, 0.029, -0.008), 1000: (0.028, 0.006, 0.053)}),)}


def register(registry: Registry) -> None:
    """Register ``float8``."""
    registry.register(
        "float8",
        Registration(
            Float8Config,
            codec=Float8Codec,
            rounds=Float8Rounds,
            source="Micikevicius et al. 2022; e8m0 scales: OCP microscaling specification, 2023",
            example="pp-backward=float8,format=e5m2",
            ladder=_LADDER,
        ),
    )
