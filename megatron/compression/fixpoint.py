"""Fixed-point numbers with shared scales: activations, their gradients, and two-step all-reduces.

AQ-SGD's stateless quantizer (Wang et al. 2022, "DirectQ"), with scales of short groups and a grid that reaches both
peaks. Scales are fp32 or bf16 without an epsilon, so tiny gradients keep their size and zero stays zero.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.api import Codec, CodecTraits, Payload
from megatron.compression.options import SEED, opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState
from megatron.compression.two_step import TwoStepSum
from megatron.kernels.grid import Grid, GridKind, Role, ScaleLayout, ScaleMethod
from megatron.kernels.ops import quantize_pack, unpack_dequantize

_ROTATIONS = tuple(1 << power for power in range(3, 11))
_LAYOUTS = {"group": ScaleLayout.GROUP, "channel": ScaleLayout.CHANNEL, "tensor": ScaleLayout.TENSOR}


@dataclass(frozen=True)
class FixpointConfig:
    """1 to 8 bits a number, with a scale for each group, channel or tensor."""

    bits: int = opt(8, "bits of each number", minimum=1, maximum=8, scheduled=True)
    scale: Literal["group", "channel", "tensor"] = opt("group", "what shares a scale")
    group: int = opt(64, "numbers in a group, along the last dimension; a multiple of 8", minimum=8, maximum=1 << 20)
    rotation: int = opt(0, "block of a Hadamard rotation that spreads outliers, 8 to 1024; 0 for none", minimum=0)
    scale_method: Literal["max", "l2"] = opt("max", "largest magnitude, or twice the root mean square")
    scale_dtype: Literal["fp32", "bf16"] = opt("fp32", "dtype of the scales on the wire")
    grid: Literal["auto", "symmetric", "asymmetric", "midrise", "minmax"] = opt(
        "auto",
        "auto is midrise at 2 and 3 bits, else symmetric; asymmetric clips the positive peak, as AQ-SGD does; "
        "minmax sends the least and the greatest number of each group",
    )
    rounding: Literal["nearest", "stochastic"] = opt("nearest", "stochastic is unbiased, and seeded")
    seed: int = opt(714, "seed of stochastic rounding", minimum=0, maximum=SEED)

    def __post_init__(self) -> None:
        if self.group % 8:
            raise UserError(f"group={self.group}: must be a multiple of 8; use {-(-self.group // 8) * 8}")
        if self.grid == "minmax" and self.scale_method == "l2":
            raise UserError("scale-method=l2: grid=minmax has limits instead of a scale; leave scale-method out")
        if not self.rotation:
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
    def of_levels(self) -> tuple[int | None, int]:
        """Bits of sums inside a node (None: sums have one level), and of all other messages."""
        return None, self.bits

    def of_bits(self, bits: int) -> FixpointConfig:
        """The options of messages with so many bits."""
        return replace(self, bits=bits)


@dataclass(frozen=True)
class FixpointSumConfig(FixpointConfig):
    """1 to 8 bits a number, with a scale for each group, channel or tensor."""

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
            raise UserError(f"bits={self.bits}: levels={self.levels} sets the bits; leave bits out")

    @property
    def of_levels(self) -> tuple[int | None, int]:
        if self.levels == "flat":
            return super().of_levels
        inside, across = self.levels.split("/")
        return int(inside), int(across)

    def of_bits(self, bits: int) -> FixpointConfig:
        return replace(self, bits=bits, levels="flat")


def _kind(grid: str, bits: int) -> GridKind:
    """The levels that a grid of the options has at a number of bits.

    A mid-rise grid uses every code. On numbers without outliers, such as rotated ones, it has the least error at 2 and
    3 bits; the more bits, the less it gains. One bit is the sign and the mean magnitude, whatever the rounding.
    """
    if grid == "auto":
        return GridKind.MIDRISE if bits in (2, 3) else GridKind.SYMMETRIC
    return GridKind[grid.upper()]


class Quantizer:
    """A format of quantized numbers, without state. 32 and 64-bit inputs are quantized in fp32.

    A message is the scales, the codes, and up to 3 bytes that make its length a multiple of 4, so that messages that
    adjacent in memory keep their scales aligned.
    """

    def __init__(self, config: FixpointConfig) -> None:
        self.config = config
        self.scale_dtype = torch.float32 if config.scale_dtype == "fp32" else torch.bfloat16

    @property
    def plain(self) -> Quantizer:
        """The format of numbers that are rotated already."""
        return Quantizer(replace(self.config, rotation=0)) if self.config.rotation else self

    def coded(self, count: int) -> int:
        """Rotated numbers in a message of so many."""
        return self._grid(torch.Size((count,))).coded(count)

    def _grid(self, shape: torch.Size) -> Grid:
        channels = shape[-1] if len(shape) else 1
        return Grid(
            bits=self.config.bits,
            layout=_LAYOUTS[self.config.scale],
            group=channels if self.config.scale == "channel" else self.config.group,
            kind=_kind(self.config.grid, self.config.bits),
            method=ScaleMethod.L2 if self.config.scale_method == "l2" else ScaleMethod.MAX,
            rotation=self.config.rotation,
        )

    def nbytes(self, shape: torch.Size) -> int:
        """Bytes of a tensor's message."""
        grid, count = self._grid(shape), shape.numel()
        return -(-(grid.scale_count(count) * self.scale_dtype.itemsize + grid.code_bytes(count)) // 4) * 4

    def _parts(self, wire: Tensor, grid: Grid, count: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of a message."""
        if not wire.numel():
            return wire, torch.empty(0, dtype=self.scale_dtype, device=wire.device)
        scale_bytes = grid.scale_count(count) * self.scale_dtype.itemsize
        codes = wire[scale_bytes : scale_bytes + grid.code_bytes(count)]
        return codes, wire[:scale_bytes].view(self.scale_dtype)

    def encode(
        self,
        x: Tensor,
        seed: int | None,
        role: Role = Role.PLAIN,
        other: Tensor | None = None,
        *,
        wire: Tensor | None = None,
    ) -> Tensor:
        """Encodes a tensor; returns the message, uint8.

        Args:
            x: tensor of any shape.
            seed: seed of the noise of stochastic rounding.
            role: DELTA encodes x - other, and moves ``other`` to what the receiver holds then; FEEDBACK encodes
                x + other, and leaves in ``other`` what was not sent.
            other: fp32 or half precision, contiguous, as large as x.
            wire: where to write it, as long as ``nbytes`` says; a new tensor unless given.
        """
        x = x.detach().contiguous()
        grid, count = self._grid(x.shape), x.numel()
        if wire is None:
            wire = torch.empty(self.nbytes(x.shape), dtype=torch.uint8, device=x.device)
        codes, scales = self._parts(wire, grid, count)
        wire[scales.numel() * scales.element_size() + codes.numel() :] = 0
        stochastic = self.config.rounding == "stochastic"
        narrow = x.float() if x.dtype == torch.float64 else x
        quantize_pack(narrow, codes, scales, grid, role, other, seed if stochastic else None)
        return wire

    def decode(self, wire: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
        """Decodes a message to fp32; groups that were not finite are NaN or infinite.

        Args:
            wire: the message.
            out: where to write it, fp32 or fp64; a new tensor unless given.
        """
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=wire.device)
        grid = self._grid(shape)
        unpack_dequantize(*self._parts(_aligned(wire), grid, shape.numel()), out, grid)
        return out

    def add_to(self, out: Tensor, wire: Tensor, negative: bool = False) -> Tensor:
        """Adds a decoded message to ``out`` (fp32 or fp64), or subtracts it, in place.

        With a message of ``Role.DELTA`` that moves the reference to what the sender holds.
        """
        grid = self._grid(out.shape)
        codes, scales = self._parts(_aligned(wire), grid, out.numel())
        unpack_dequantize(codes, -scales if negative else scales, out, grid, Role.ADD)
        return out


def _aligned(wire: Tensor) -> Tensor:
    """Returns the message, copied if its start is not aligned to 4 bytes, as its scales need."""
    return wire.clone() if wire.storage_offset() % 4 else wire


def message_seed(seed: int, *parts: object) -> int:
    """A seed of 63 bits, from a run's seed and the name of the message."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _levels_problem(config: FixpointConfig) -> str:
    """The reason why neither messages nor sums of tensor-parallel ranks have these options; empty when they may."""
    inside, across = config.of_levels
    if inside is None:
        return ""
    return (
        f"levels={inside}/{across} is for sums of gradients over several nodes (dp-grad, embedding); write "
        f"bits={across} here"
    )


class FixpointCodec(Codec):
    """Quantized messages."""

    traits = CodecTraits(steady=("messages",))
    config: FixpointConfig

    def __init__(self, config: FixpointConfig | None = None) -> None:
        super().__init__(config or FixpointConfig())
        self.quantizer = Quantizer(self.config)

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        return _levels_problem(self.config)

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(self.quantizer.nbytes(shape), dtype=torch.uint8, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        seed = None
        if self.config.rounding == "stochastic":
            seed = message_seed(self.config.seed, state.count("messages"), key)
            state.stage("messages", state.count("messages") + 1)
        return Payload(self.quantizer.encode(x, seed))

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return self.quantizer.decode(payload.wire, shape).to(dtype)


class FixpointRounds(TwoStepSum):
    """The two-step all-reduce with quantized messages."""

    config: FixpointConfig

    def __init__(self, config: FixpointConfig | None = None) -> None:
        super().__init__(config or FixpointConfig())
        inside, across = self.config.of_levels
        self.format = Quantizer(self.config.of_bits(across))
        self.inside = None if inside is None else Quantizer(self.config.of_bits(inside))
        self.traits = replace(self.traits, levels=inside is not None)

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        return _levels_problem(self.config) if point in (Point.TP_FWD, Point.TP_BWD) else ""

    def seed(self, state: CompressorState, message: int) -> int | None:
        if self.config.rounding == "nearest":
            return None
        return message_seed(self.config.seed, state.count("messages"), message)


def register(registry: Registry) -> None:
    """Registers ``fixpoint``."""
    points = frozenset(Point) - {Point.CONTROL}
    registry.register(
        "fixpoint", Registration(FixpointSumConfig, codec=FixpointCodec, rounds=FixpointRounds, points=points)
    )
