"""Formats of thin factors, as low-rank compressors send them: numbers, half precision, or quantized."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from megatron.compression.api import Peers, Request
from megatron.compression.approximation import dense
from megatron.compression.cast import CastConfig, CastRounds
from megatron.compression.fixpoint import FixpointConfig, FixpointRounds
from megatron.compression.float8 import Float8Config, Float8Rounds
from megatron.compression.state import CompressorState
from megatron.compression.two_step import TwoStepSum

FormatName: TypeAlias = Literal["fp32", "bf16", "fixpoint8", "fixpoint4"]


def _two_step(name: FormatName, small_rows: bool) -> TwoStepSum | None:
    """The all-reduce of a format; None for numbers, which are summed on their way.

    At 8 bits the error is far below that of the rank, so the groups are long. At 4 bits it is not: shorter groups and a
    rotation lower it.
    """
    if name == "bf16":
        return CastRounds(CastConfig("bf16"))
    if name == "fixpoint8" and small_rows:
        return Float8Rounds(Float8Config(tile=128, scale_dtype="bf16"))
    if name == "fixpoint8":
        return FixpointRounds(FixpointConfig(bits=8, group=128, scale_dtype="bf16"))
    if name == "fixpoint4":
        return FixpointRounds(FixpointConfig(bits=4, group=64, scale_dtype="bf16", rotation=64))
    return None


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of numbers that are computed and sent as they are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FactorFormat:
    """A format of stacks of thin factors (k, n, r).

    The columns of a factor belong to singular values of very different sizes. They are laid out one behind the other,
    so that a group of quantized numbers is a part of one column, and small columns keep their digits.

    Args:
        name: the format.
        small_rows: 8 bits are floats, which keep the digits of small rows too, at a larger error of large ones.
    """

    def __init__(self, name: FormatName, small_rows: bool = False) -> None:
        self._two_step = _two_step(name, small_rows)

    @property
    def exact(self) -> bool:
        """Whether factors are sent as they are."""
        return self._two_step is None

    def nbytes(self, count: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the message of a factor with ``count`` numbers of a dtype."""
        if self._two_step is None:
            return count * wire_dtype(dtype).itemsize
        return self._two_step.format.nbytes(torch.Size((count,)))

    def all_reduce(
        self, x_knr: Tensor, state: CompressorState, peers: Peers
    ) -> Generator[Request, Tensor, tuple[Tensor, Tensor]]:
        """All-reduces factors; all ranks get the same bits.

        Returns:
            The sum, and what this rank contributed to it, both (k, n, r): its factors as its messages hold them, with
            the error of shortening the part of the sum that it serves. The contributions add up to the sum.
        """
        if self._two_step is None:
            total_knr = yield Request(x_knr.clone())
            return total_knr, x_knr
        columns_krn = x_knr.transpose(1, 2).contiguous()
        # All of the sum is needed here, however little of the result is.
        aggregate = yield from self._two_step.rounds(columns_krn, state, replace(peers, sharded=False))
        assert aggregate.local is not None
        total_krn, own_krn = (dense(part, columns_krn) for part in (aggregate.total, aggregate.local))
        return total_krn.transpose(1, 2).contiguous(), own_krn.transpose(1, 2).contiguous()

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for messages of ``count`` bytes together."""
        kind = torch.uint8 if self._two_step else wire_dtype(dtype)
        return torch.empty(count // kind.itemsize, dtype=kind, device=device)

    def encode(self, x_knr: Tensor) -> Tensor:
        """The message of factors, flat."""
        if self._two_step is None:
            return x_knr.flatten()
        wire = torch.zeros(self.nbytes(x_knr.numel()), dtype=torch.uint8, device=x_knr.device)
        return self._two_step.format.encode(x_knr.transpose(1, 2).flatten(), None, wire=wire)

    def decode(self, wire: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """The factors (k, n, r) in a message; they may lie in it."""
        k, n, r = shape
        if self._two_step is None:
            return wire.view(shape)
        columns_krn = torch.empty((k, r, n), dtype=wire_dtype(dtype), device=wire.device)
        self._two_step.format.decode(wire, torch.Size((columns_krn.numel(),)), columns_krn.view(-1))
        return columns_krn.transpose(1, 2).contiguous()
