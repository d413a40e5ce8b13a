"""Half precision on the wire: what a run in fp32 is fairly compared with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.options import opt
from megatron.compression.state import CompressorState
from megatron.compression.two_step import TwoStepSum
from megatron.kernels.grid import Role

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CastConfig:
    """Numbers in half precision."""

    dtype: Literal["bf16", "fp16"] = opt("bf16", "on the wire; fp16 overflows beyond 65504")


class HalfFormat:
    """Numbers in half precision, and up to 2 bytes that make a message's length a multiple of 4."""

    def __init__(self, config: CastConfig) -> None:
        self.dtype = _DTYPES[config.dtype]

    def nbytes(self, shape: torch.Size) -> int:
        """Bytes of a tensor's message."""
        return -(-shape.numel() // 2) * 4

    def encode(self, x: Tensor, seed: int | None, *, wire: Tensor | None = None) -> Tensor:
        """The message, uint8, in ``wire`` where that is given; nothing is drawn."""
        if wire is None:
            wire = torch.zeros(self.nbytes(x.shape), dtype=torch.uint8, device=x.device)
        if x.numel():
            wire[: 2 * x.numel()].view(self.dtype).copy_(x.reshape(-1))
        return wire

    def decode(
        self,
        wire: Tensor,
        shape: torch.Size,
        out: Tensor | None = None,
        role: Role = Role.PLAIN,
        negative: bool = False,
    ) -> Tensor:
        """The tensor of a message, or its opposite, fp32: new, written to ``out``, or (``Role.ADD``) added to it."""
        if out is None:
            out = torch.zeros(shape, dtype=torch.float32, device=wire.device)
        if not shape.numel():
            return out
        values = wire[: 2 * shape.numel()].view(self.dtype).view(shape)
        if role is Role.ADD:
            return out.add_(values, alpha=-1 if negative else 1)
        out.copy_(values)
        return out.neg_() if negative else out


class CastCodec(Codec):
    """Messages in half precision."""

    config: CastConfig

    def __init__(self, config: CastConfig | None = None) -> None:
        super().__init__(config or CastConfig())
        self.dtype = _DTYPES[self.config.dtype]

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
    """Sums of messages in half precision, made in fp32."""

    config: CastConfig

    def __init__(self, config: CastConfig | None = None) -> None:
        super().__init__(config or CastConfig())
        self.format = HalfFormat(self.config)

    def seed(self, state: CompressorState, message: int) -> int | None:
        return None
