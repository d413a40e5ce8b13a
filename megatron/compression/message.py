"""Message formats, the layout of codes with shared scales, seeds of the rounding noise, and a codec."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron.base.seeds import keyed_seed
from megatron.compression.api import Codec, CodecTraits, Payload
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class ScaledCodes:
    """Layout of a message: scales, codes, and padding to a multiple of 4 bytes, so that the scales of adjacent messages
    in memory stay aligned.

    Args:
        scales: number of scales of each stream of codes.
        scale_dtype: dtype of all scales.
        codes: bytes of each section after the scales: codes, and metadata for decoding them.
    """

    scales: tuple[int, ...]
    scale_dtype: torch.dtype
    codes: tuple[int, ...]

    @cached_property
    def _sizes(self) -> list[int]:
        return [*(count * self.scale_dtype.itemsize for count in self.scales), *self.codes]

    @cached_property
    def _content_bytes(self) -> int:
        return sum(self._sizes)

    @cached_property
    def nbytes(self) -> int:
        """Size of the message in bytes."""
        return -(-self._content_bytes // 4) * 4

    def to_write(self, wire: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of scales and codes for writing a message; the padding is zeroed."""
        if self._content_bytes < self.nbytes:
            wire[self._content_bytes :] = 0
        return self._split_wire(wire)

    def to_read(self, wire: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Scales and codes of a message; copies if the message is not aligned to 4 bytes."""
        return self._split_wire(wire.clone() if wire.storage_offset() % 4 else wire)

    def _split_wire(self, wire: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        filled = wire if wire.numel() == self._content_bytes else wire[: self._content_bytes]
        sections = filled.split(self._sizes)
        scales = [
            # An empty section may be unaligned.
            section.view(self.scale_dtype) if section.numel() else section.new_empty(0, dtype=self.scale_dtype)
            for section in sections[: len(self.scales)]
        ]
        return scales, list(sections[len(self.scales) :])


class Rounding(Protocol):
    """Options of rounding."""

    @property
    def rounding(self) -> str:
        """``nearest`` or ``stochastic``."""

    @property
    def seed(self) -> int:
        """Seed of stochastic rounding."""


def noise_seed(config: Rounding, state: CompressorState, name: Hashable) -> int | None:
    """Seed of a step's message; None for rounding to nearest."""
    return None if config.rounding == "nearest" else keyed_seed(config.seed, state.count("messages"), name)


class Format(Protocol):
    """Stateless message format that converts tensors to bytes and back."""

    def nbytes(self, shape: torch.Size) -> int:
        """Size of a tensor's message in bytes, a multiple of 4."""

    def encode(self, x: Tensor, seed: int | None, *, wire: Tensor) -> Tensor:
        """Write the message, uint8, to ``wire``; ``seed`` is for the noise of stochastic rounding."""

    def decode(self, wire: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
        """Decode a message to fp32, to a new tensor or to ``out``."""

    def add_to(self, out: Tensor, wire: Tensor, negative: bool = False) -> Tensor:
        """Add a decoded message to ``out``, or subtract it, in place."""

    @property
    def plain(self) -> Format:
        """The same messages as a format of transformed numbers, if the format applies a linear transform (a rotation).

        Sums are computed on the transformed numbers, and only the last sum is transformed back.
        """
        return self

    def coded(self, count: int) -> int:
        """Number of transformed values in a message of ``count`` values."""
        return count


class FormatCodec(Codec):
    """Codec of messages in a ``Format``."""

    traits = CodecTraits(steady=("messages",), quantizes=True)

    def __init__(self, config: Rounding, format: Format) -> None:
        super().__init__(config)
        self.format = format

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(self.format.nbytes(shape), dtype=torch.uint8, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        seed = noise_seed(self.config, state, key)
        if seed is not None:
            state.stage("messages", state.count("messages") + 1)
        payload = self.empty_payload(x.shape, x.dtype, x.device, state, key)
        self.format.encode(x, seed, wire=payload.wire)
        return payload

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return self.format.decode(payload.wire, shape).to(dtype)
