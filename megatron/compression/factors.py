"""Formats of thin factors for low-rank compressors: full precision, half precision, or quantized."""

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


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of factors in full precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FactorFormat:
    """Format of stacks of thin factors (k, n, r).

    The columns of a factor belong to singular values of very different sizes. Columns are contiguous in the message, so
    that a quantization group lies within a column, and small columns keep their precision.

    Args:
        name: the format.
        small_rows: use floats at 8 bits, which preserve small rows, with a larger error in large rows.
    """

    def __init__(self, name: FormatName, small_rows: bool = False) -> None:
        self._two_step: TwoStepSum | None = None  # full precision: a plain all-reduce
        if name == "bf16":
            self._two_step = CastRounds(CastConfig("bf16"))
        elif name == "fixpoint8" and small_rows:
            self._two_step = Float8Rounds(Float8Config(tile=128, scale_dtype="bf16"))
        elif name == "fixpoint8":  # long groups: the quantization error is far below the low-rank error
            self._two_step = FixpointRounds(FixpointConfig(bits=8, group=128, scale_dtype="bf16"))
        elif name == "fixpoint4":  # shorter groups and a rotation, because here it is not
            self._two_step = FixpointRounds(FixpointConfig(bits=4, group=64, scale_dtype="bf16", rotation=64))

    @property
    def exact(self) -> bool:
        """Whether factors are sent in full precision."""
        return self._two_step is None

    def nbytes(self, count: int, dtype: torch.dtype = torch.float32) -> int:
        """Size in bytes of the message of a factor with ``count`` numbers of a dtype."""
        if self._two_step is None:
            return count * wire_dtype(dtype).itemsize
        return self._two_step.format.nbytes(torch.Size((count,)))

    def all_reduce(
        self, x_knr: Tensor, state: CompressorState, peers: Peers
    ) -> Generator[Request, Tensor, tuple[Tensor, Tensor]]:
        """All-reduce factors; all ranks get the same bits.

        Returns:
            The sum and this rank's contribution to it, both (k, n, r). The contribution is the content of its messages,
            plus the error of encoding its chunk of the sum. The contributions add up to the sum.
        """
        if self._two_step is None:
            total_knr = yield Request(x_knr.clone())
            return total_knr, x_knr
        columns_krn = x_knr.transpose(1, 2).contiguous()
        # The whole sum is needed here, even if only a shard of the result is read.
        aggregate = yield from self._two_step.rounds(columns_krn, state, replace(peers, sharded=False))
        assert aggregate.local is not None
        total_krn, local_krn = (
            dense(approximation, columns_krn) for approximation in (aggregate.total, aggregate.local)
        )
        return total_krn.transpose(1, 2).contiguous(), local_krn.transpose(1, 2).contiguous()

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Buffer for messages of ``count`` bytes in total."""
        kind = torch.uint8 if self._two_step else wire_dtype(dtype)
        return torch.empty(count // kind.itemsize, dtype=kind, device=device)

    def encode(self, x_knr: Tensor) -> Tensor:
        """Encode factors to a flat message."""
        if self._two_step is None:
            return x_knr.flatten()
        wire = torch.zeros(self.nbytes(x_knr.numel()), dtype=torch.uint8, device=x_knr.device)
        return self._two_step.format.encode(x_knr.transpose(1, 2).flatten(), None, wire=wire)

    def decode(self, wire: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Decode the factors (k, n, r) of a message; the result may alias the message."""
        k, n, r = shape
        if self._two_step is None:
            return wire.view(shape)
        columns_krn = torch.empty((k, r, n), dtype=wire_dtype(dtype), device=wire.device)
        self._two_step.format.decode(wire, torch.Size((columns_krn.numel(),)), columns_krn.view(-1))
        return columns_krn.transpose(1, 2).contiguous()
