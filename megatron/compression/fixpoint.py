"""Fixed-point numbers with shared scales: activations, their gradients, and two-step all-reduces.

AQ-SGD's stateless quantizer (Wang et al. 2022, "DirectQ"), with scales of short groups and a grid that reaches both
peaks. Scales are fp32 or bf16 without an epsilon, so tiny gradients keep their size and zero stays zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.fixpoint_ladder import LADDER
from megatron.compression.message import Format, FormatCodec, ScaledCodes
from megatron.compression.options import MAX_SEED, opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.tiles import make_mixture, map_bytes
from megatron.compression.two_step import TwoStepSum
from megatron.kernels.grid import Grid, GridKind, Role, ScaleLayout, ScaleMethod
from megatron.kernels.ops import dequantize_tiles, quantize_pack, quantize_tiles, unpack_dequantize
from megatron.kernels.tiles import Outliers, TiledMessage, Tiles

_ROTATIONS = tuple(1 << power for power in range(3, 11))
_LAYOUTS = {"group": ScaleLayout.GROUP, "channel": ScaleLayout.CHANNEL, "tensor": ScaleLayout.TENSOR}


@dataclass(frozen=True)
class FixpointConfig:
    """1 to 8 bits per value, with a scale for each group, channel or tensor."""

    bits: float = opt(
        8,
        "bits per value; with a fraction, such as 3.8, tiles get 3 or 4 bits, depending on their error",
        minimum=1,
        maximum=8,
        scheduled=True,
        whole_ramp=True,
    )
    scale: Literal["group", "channel", "tensor"] = opt("group", "what shares a scale")
    group: int = opt(64, "values per group, along the last dimension; a multiple of 8", minimum=8, maximum=1 << 20)
    rotation: int = opt(0, "block size of a Hadamard rotation that spreads outliers, 8 to 1024; 0 for none", minimum=0)
    rotate_when: Literal["always", "outlier"] = opt("always", "which blocks are rotated")
    outlier_ratio: float = opt(
        2.0, "ratio of largest to second-largest magnitude above which rotate-when=outlier rotates a block", minimum=1
    )
    scale_method: Literal["max", "l2"] = opt("max", "largest magnitude, or twice the root mean square")
    scale_dtype: Literal["fp32", "bf16"] = opt("fp32", "dtype of the scales on the wire")
    grid: Literal["auto", "symmetric", "asymmetric", "signed", "midrise", "minmax"] = opt(
        "auto",
        "auto is signed at 2 and 3 bits (midrise at 2 with a rotation), else symmetric; asymmetric clips the "
        "positive peak, as AQ-SGD does; minmax sends the smallest and the largest value of each group",
    )
    rounding: Literal["nearest", "stochastic"] = opt(
        "nearest", "stochastic is seeded, and unbiased unless the grid or the scale clips"
    )
    seed: int = opt(714, "seed of stochastic rounding", minimum=0, maximum=MAX_SEED)

    def __post_init__(self) -> None:
        if self.group % 8:
            raise UserError(f"group={self.group}: must be a multiple of 8; use {-(-self.group // 8) * 8}")
        if self.group != type(self).group and self.scale != "group":
            raise UserError(
                f"group={self.group}: means nothing with scale={self.scale}; use scale=group, or leave group out"
            )
        if self.grid == "minmax" and self.scale_method == "l2":
            raise UserError("scale-method=l2: grid=minmax has limits instead of a scale; leave scale-method out")
        if self.grid == "signed" and self.bits < 2:
            raise UserError(
                f"grid=signed: {self.bits:g} bits have no level on one side of zero; use 2, or leave grid out"
            )
        floor = int(self.bits)
        if self.bits != floor:
            tile = max(self.group, self.rotation if self.rotate_when == "always" else 0)
            if self.scale != "group":
                raise UserError(
                    f"bits={self.bits:g}: tiles of {floor} and {floor + 1} bits have scales of their own; use "
                    f"scale=group, or bits={floor}"
                )
            if (self.bits - floor) * tile <= 1:
                raise UserError(
                    f"bits={self.bits:g}: the map of tiles takes 1/{tile} of a bit, which leaves none a bit more; use "
                    f"bits={floor}, or at least {floor + 2 / tile:g}"
                )
        if self.outlier_ratio != type(self).outlier_ratio and self.rotate_when != "outlier":
            raise UserError(
                f"outlier-ratio={self.outlier_ratio:g}: means nothing with rotate-when={self.rotate_when}; add "
                "rotate-when=outlier, or leave outlier-ratio out"
            )
        if not self.rotation:
            if self.rotate_when == "outlier":
                raise UserError("rotate-when=outlier: there is no rotation; add rotation=64, or leave rotate-when out")
            return
        if self.rotation not in _ROTATIONS:
            raise UserError(f"rotation={self.rotation}: must be 0 or a power of two from 8 to 1024; use 64")
        if self.scale == "channel":
            raise UserError(
                f"rotation={self.rotation}: mixes channels, so their scales cannot be kept; use scale=group"
            )
        if self.scale == "group" and self.group & (self.group - 1):
            raise UserError(f"group={self.group}: must be a power of two with a rotation; use group={self.rotation}")

    @property
    def level_bits(self) -> tuple[int | None, float]:
        """Bits of sums within a node (None for single-level sums), and of all other messages."""
        return None, self.bits

    def with_bits(self, bits: float) -> FixpointConfig:
        """The options with ``bits`` bits per number."""
        return replace(self, bits=bits)


@dataclass(frozen=True)
class FixpointSumConfig(FixpointConfig):
    """1 to 8 bits per value, with a scale for each group, channel or tensor."""

    levels: str = opt("flat", "bits of sums inside a node and between nodes, such as 8/4; flat for one level")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels == "flat":
            return
        if not re.fullmatch("[1-8]/[1-8]", self.levels):
            raise UserError(
                f"levels={self.levels}: write the bits inside a node, /, and those between nodes, each 1 to 8, such as "
                "levels=8/4; or levels=flat"
            )
        if self.bits != 8:
            raise UserError(f"bits={self.bits:g}: levels={self.levels} sets the bits; leave bits out")

    @property
    def level_bits(self) -> tuple[int | None, float]:
        if self.levels == "flat":
            return super().level_bits
        inside, across = self.levels.split("/")
        return int(inside), int(across)

    def with_bits(self, bits: float) -> FixpointConfig:
        return replace(self, bits=bits, levels="flat")


@dataclass(frozen=True)
class _Layout:
    """Encoding of a tensor.

    Args:
        grid: the grid.
        count: number of elements.
        tiles: per-tile decisions; None without any.
        scale_dtype: dtype of the scales.
    """

    grid: Grid
    count: int
    tiles: Tiles | None
    scale_dtype: torch.dtype

    @cached_property
    def message(self) -> ScaledCodes:
        """Layout of the message: scales of each stream, codes of each stream, and, with per-tile decisions, the bitmaps
        of rotated blocks and of tiles with an extra bit."""
        streams = self.tiles.streams if self.tiles else ((self.grid, self.count),)
        scales = tuple(grid.scale_count(count) for grid, count in streams)
        codes = tuple(grid.code_bytes(count) for grid, count in streams)
        maps = tuple(map(map_bytes, self.tiles.maps)) if self.tiles else ()
        return ScaledCodes(scales, self.scale_dtype, (*codes, *maps))


def _make_message(scales: list[Tensor], codes: list[Tensor]) -> TiledMessage:
    return TiledMessage(scales, codes[:-2], *codes[-2:])


class Quantizer(Format):
    """Stateless format of quantized numbers. 32-bit and 64-bit inputs are quantized in fp32."""

    def __init__(self, config: FixpointConfig, rotated: bool = False) -> None:
        self.config = config
        self.rotated = rotated
        self.scale_dtype = torch.float32 if config.scale_dtype == "fp32" else torch.bfloat16
        self._layouts: dict[torch.Size, _Layout] = {}

    @cached_property
    def plain(self) -> Quantizer:
        """The format for numbers that are already rotated."""
        return Quantizer(self.config, rotated=True) if self._rotates else self

    @property
    def _rotates(self) -> bool:
        """Whether every block is rotated."""
        return self.config.rotation > 0 and self.config.rotate_when == "always"

    def coded(self, count: int) -> int:
        """Number of rotated values in a message of ``count`` values."""
        return self._grid(torch.Size((count,)), int(self.config.bits)).coded(count)

    def _grid(self, shape: torch.Size, bits: int) -> Grid:
        channels = shape[-1] if len(shape) else 1
        # At few bits, a symmetric grid's unused code is expensive. A mid-rise grid has the lowest error on numbers
        # without outliers, such as rotated numbers, and a large error on other numbers, because it has no zero level. A
        # signed grid is nearly as good or better on all numbers. At 1 bit, the code is the sign, and the scale is the
        # mean magnitude, with any rounding.
        if self.config.grid != "auto":
            kind = GridKind[self.config.grid.upper()]
        elif bits not in (2, 3):
            kind = GridKind.SYMMETRIC
        else:
            kind = GridKind.MIDRISE if bits == 2 and self._rotates else GridKind.SIGNED
        return Grid(
            bits=bits,
            layout=_LAYOUTS[self.config.scale],
            group=channels if self.config.scale == "channel" else self.config.group,
            kind=kind,
            method=ScaleMethod.L2 if self.config.scale_method == "l2" else ScaleMethod.MAX,
            rotation=self.config.rotation if self._rotates and not self.rotated else 0,
        )

    def _layout(self, shape: torch.Size) -> _Layout:
        if shape in self._layouts:
            return self._layouts[shape]
        count, bits = shape.numel(), int(self.config.bits)
        grid, mixed, outliers = self._grid(shape, bits), None, None
        if bits != self.config.bits:
            tile = max(self.config.group, self.config.rotation if self._rotates else 0)
            mixed = make_mixture(grid, self._grid(shape, bits + 1), tile, self.config.bits, grid.coded(count))
        if self.config.rotate_when == "outlier":
            outliers = Outliers(self.config.rotation, self.config.outlier_ratio)
        tiles = Tiles(grid, count, outliers, mixed) if mixed or outliers else None
        layout = self._layouts[shape] = _Layout(grid, count, tiles, self.scale_dtype)
        return layout

    def nbytes(self, shape: torch.Size) -> int:
        """Size of a tensor's message in bytes."""
        return self._layout(shape).message.nbytes

    def encode(
        self,
        x: Tensor,
        seed: int | None,
        role: Role = Role.PLAIN,
        other: Tensor | None = None,
        *,
        wire: Tensor | None = None,
    ) -> Tensor:
        """Encode a tensor, and return the message, uint8.

        Args:
            x: tensor of any shape.
            seed: seed of the noise of stochastic rounding.
            role: DELTA encodes x - other and updates ``other`` to the receiver's new value. FEEDBACK encodes x + other
                and leaves the quantization error in ``other``.
            other: fp32 or half precision, contiguous, with as many elements as x.
            wire: output buffer of ``nbytes`` bytes; a new tensor if None.
        """
        x = x.detach().contiguous()
        layout = self._layout(x.shape)
        if wire is None:
            wire = torch.empty(self.nbytes(x.shape), dtype=torch.uint8, device=x.device)
        scales, codes = layout.message.to_write(wire)
        seed = seed if self.config.rounding == "stochastic" else None
        narrow = x.float() if x.dtype == torch.float64 else x
        if layout.tiles:
            quantize_tiles(narrow, _make_message(scales, codes), layout.tiles, role, other, seed)
        else:
            quantize_pack(narrow, codes[0], scales[0], layout.grid, role, other, seed)
        return wire

    def decode(self, wire: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
        """Decode a message to fp32; groups with nonfinite inputs are NaN or infinite.

        Args:
            wire: the message.
            out: output tensor, fp32 or fp64; a new tensor if None.
        """
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=wire.device)
        layout = self._layout(shape)
        scales, codes = layout.message.to_read(wire)
        if layout.tiles:
            dequantize_tiles(_make_message(scales, codes), out, layout.tiles)
        else:
            unpack_dequantize(codes[0], scales[0], out, layout.grid)
        return out

    def add_to(self, out: Tensor, wire: Tensor, negative: bool = False) -> Tensor:
        """Add a decoded message to ``out`` (fp32 or fp64), or subtract it, in place.

        With a message of ``Role.DELTA``, this updates the reference to the sender's value.
        """
        layout = self._layout(out.shape)
        scales, codes = layout.message.to_read(wire)
        signed = [-scale for scale in scales] if negative else scales
        if layout.tiles:
            dequantize_tiles(_make_message(signed, codes), out, layout.tiles, Role.ADD)
        else:
            unpack_dequantize(codes[0], signed[0], out, layout.grid, Role.ADD)
        return out


def _levels_problem(config: FixpointConfig) -> str:
    """The reason why messages and tensor-parallel sums cannot use these options; empty if they can."""
    inside, across = config.level_bits
    if inside is None:
        return ""
    return (
        f"levels={inside}/{across} is for sums of gradients over several nodes (dp-grad, embedding); write "
        f"bits={across} here"
    )


class FixpointCodec(FormatCodec):
    """Codec of quantized messages."""

    config: FixpointConfig

    def __init__(self, config: FixpointConfig | None = None) -> None:
        config = config or FixpointConfig()
        super().__init__(config, Quantizer(config))

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        return _levels_problem(self.config)


class FixpointRounds(TwoStepSum):
    """Two-step all-reduce with quantized messages."""

    config: FixpointConfig

    def __init__(self, config: FixpointConfig | None = None) -> None:
        super().__init__(config or FixpointConfig())
        inside, across = self.config.level_bits
        self.format = Quantizer(self.config.with_bits(across))
        self.inside = None if inside is None else Quantizer(self.config.with_bits(inside))
        self.traits = replace(self.traits, levels=inside is not None)

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        return _levels_problem(self.config) if point in (Point.TP_FWD, Point.TP_BWD) else ""


def register(registry: Registry) -> None:
    """Register ``fixpoint``."""
    registry.register(
        "fixpoint",
        Registration(
            FixpointSumConfig,
            codec=FixpointCodec,
            rounds=FixpointRounds,
            source="AQ-SGD's stateless quantizer, Wang et al. 2022; with levels, SDP4Bit, Jia et al. 2024",
            example="pp-forward=fixpoint,bits=4",
            ladder=LADDER,
        ),
    )
