"""A plug-in compressor that turns everything into NaN, for tests of runs that diverge because of it."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, CodecTraits, Payload, Peers, Request, RoundCompressor
from megatron.compression.identity import IdentityCodec
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState

MODULE = str(Path(__file__).resolve())
"""The value of ``--compress-module``."""


@dataclass(frozen=True)
class NanConfig:
    """Sends NaN."""


class NanCodec(IdentityCodec):
    """Messages of NaN."""

    traits = CodecTraits()

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        return Payload(torch.full_like(x, torch.nan))


class NanRounds(RoundCompressor):
    """Sums of NaN."""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        total = yield Request(torch.full_like(x, torch.nan))
        return Aggregate(total, torch.full_like(x, torch.nan))


def register(registry: Registry) -> None:
    """Register ``nan-codes``."""
    registry.register("nan-codes", Registration(NanConfig, codec=NanCodec, rounds=NanRounds))
