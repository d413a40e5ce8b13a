"""The identity, the default compressor of every communication point."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Codec, CodecTraits, Op, Payload, Peers, Request, RoundCompressor
from megatron.compression.ladder import Rung
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class IdentityConfig:
    """Uncompressed traffic."""


class IdentityRounds(RoundCompressor):
    """Exact all-reduce in a single round."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        total = yield Request(x, Op.REDUCE, shard_only=True)
        return Aggregate(total=total, local=None)


class IdentityCodec(Codec):
    """Codec that sends the tensor unchanged."""

    traits = CodecTraits(exact=True)

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(shape, dtype=dtype, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        return Payload(x.contiguous())

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return payload.wire

    def decode_gathered(
        self,
        payloads: Payload,
        size: int,
        shape: torch.Size,
        dtype: torch.dtype,
        state: CompressorState,
        key: Hashable,
    ) -> Tensor:
        return payloads.wire


_LADDER: dict[Point, tuple[Rung, ...]] = {
    # The same sum by one all-reduce in place of two: no loss changes, beyond the order of the sum.
    Point.EMBED_GRAD: (Rung("fused=on", {1000: (0.0, 0.0)}),),
}


def register(registry: Registry) -> None:
    """Register the identity as ``none`` and ``identity``."""
    for name, ladder in (("none", _LADDER), ("identity", {})):
        registry.register(
            name,
            Registration(
                IdentityConfig,
                codec=IdentityCodec,
                rounds=IdentityRounds,
                no_feedback="leaves no error",
                example=f"dp-grad={name}",
                identity=True,
                ladder=ladder,
            ),
        )
