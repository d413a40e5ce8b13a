"""Half precision on the wire, a baseline for compressors in fp32 runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.message import Format
from megatron.compression.options import opt
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState
from megatron.compression.two_step import TwoStepSum

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CastConfig:
    """Values in half precision."""

    dtype: Literal["bf16", "fp16"] = opt("bf16", "data type on the wire; fp16 overflows beyond 65504")


class HalfFormat(Format):
    """Format of half-precision numbers, padded to a multiple of 4 bytes."""

    def __init__(self, config: CastConfig) -> None:
        self.dtype = _DTYPES[config.dtype]

    def nbytes(self, shape: torch.Size) -> int:
        """Size of a tensor's message in bytes."""
        return -(-shape.numel() // 2) * 4

    def encode(self, x: Tensor, seed: int | None, *, wire: Tensor) -> Tensor:
        """Write the message, uint8, to ``wire``; the seed is not used."""
        if x.numel():
            self._values(wire, x.shape).copy_(x)
        return wire

    def decode(self, wire: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
        """Decode a message to fp32, to a new tensor or to ``out``."""
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=wire.device)
        return out.copy_(self._values(wire, shape)) if shape.numel() else out

    def add_to(self, out: Tensor, wire: Tensor, negative: bool = False) -> Tensor:
        """Add a decoded message to ``out``, or subtract it, in place."""
        return out.add_(self._values(wire, out.shape), alpha=-1 if negative else 1) if out.numel() else out

    def _values(self, wire: Tensor, shape: torch.Size) -> Tensor:
        """View of a message's numbers; an empty message may be unaligned."""
        return wire[: 2 * shape.numel()].view(self.dtype).view(shape)


class CastCodec(Codec):
    """Codec of half-precision messages."""

    config: CastConfig

    def __init__(self, config: CastConfig | None = None) -> None:
        super().__init__(config or CastConfig())
        self.dtype = _DTYPES[self.config.dtype]

    def should_compress(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        return dtype.itemsize > self.dtype.itemsize

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(shape, dtype=self.dtype, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        return Payload(x.detach().to(self.dtype).contiguous())

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return payload.wire.to(dtype)


class CastRounds(TwoStepSum):
    """Two-step all-reduce with half-precision messages, summed in fp32."""

    config: CastConfig

    def __init__(self, config: CastConfig | None = None) -> None:
        super().__init__(config or CastConfig())
        self.format = HalfFormat(self.config)

    def seed(self, state: CompressorState, message: int) -> int | None:
        return None


def register(registry: Registry) -> None:
    """Register ``cast``."""
    registry.register("cast", Registration(CastConfig, codec=CastCodec, rounds=CastRounds, example="dp-grad=cast"))
