"""Low-rank messages: a matrix as two thin factors (Optimus-CC, Song et al. 2023, section 5.1)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.approximation import Approximation, Factors, dense
from megatron.compression.linalg import matrix_shape, random_bases
from megatron.compression.options import SEED, opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState
from megatron.kernels.ops import orthonormalize


@dataclass(frozen=True)
class LowRankConfig:
    """Two thin factors of one power iteration."""

    rank: int = opt(16, "columns of the factors", minimum=1, scheduled=True)
    warm_start: bool = opt(True, "begin each message at the last one's factor")
    seed: int = opt(714, "seed of the first factor", minimum=0, maximum=SEED)


class LowRankCodec(Codec):
    """Sends P (n x r, orthonormal) and Q = M^T P (m x r) of the matrix M (tokens x hidden), in fp32, as one message.

    A message that would not be smaller than the matrix is the matrix itself.
    """

    config: LowRankConfig

    def _rank(self, shape: torch.Size) -> int | None:
        """The rank of the factors; None where the matrix itself is no larger than they are."""
        n, m = matrix_shape(shape)
        rank = min(n, m, self.config.rank)
        return rank if rank * (n + m) < n * m else None

    def should_compress(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        rank, (n, m) = self._rank(shape), matrix_shape(shape)
        return rank is not None and rank * (n + m) * _wide(dtype).itemsize < n * m * dtype.itemsize

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        rank, (n, m) = self._rank(shape), matrix_shape(shape)
        if rank is None:
            return Payload(torch.empty(shape, dtype=dtype, device=device))
        return Payload(torch.empty(rank * (n + m), dtype=_wide(dtype), device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        rank, (n, m) = self._rank(x.shape), matrix_shape(x.shape)
        if rank is None:
            return Payload(x.detach().clone(memory_format=torch.contiguous_format))
        matrix_1nm = x.reshape(1, n, m).to(_wide(x.dtype))
        q_1mr = state.get("q") if self.config.warm_start else None
        if q_1mr is not None and q_1mr.shape[1] == m and q_1mr.shape[2] > rank:
            q_1mr = q_1mr[:, :, :rank]
        elif q_1mr is None or q_1mr.shape != (1, m, rank):
            q_1mr = random_bases(1, m, rank, self.config.seed, f"{n}x{m}", matrix_1nm)
        p_1nr = orthonormalize(matrix_1nm @ orthonormalize(q_1mr))
        q_1mr = matrix_1nm.transpose(1, 2) @ p_1nr
        if self.config.warm_start:
            state.stage("q", q_1mr)
        return Payload(torch.cat([p_1nr.flatten(), q_1mr.flatten()]))

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        factors = self._factors(payload, shape)
        return payload.wire if factors is None else dense(factors, payload.wire.new_empty(shape)).to(dtype)

    def reconstruct(self, payload: Payload, x: Tensor, state: CompressorState, key: Hashable) -> Tensor | Approximation:
        return self._factors(payload, x.shape) or payload.wire

    def _factors(self, payload: Payload, shape: torch.Size) -> Factors | None:
        """The factors in a message; None where the matrix itself was sent."""
        rank, (n, m) = self._rank(shape), matrix_shape(shape)
        if rank is None:
            return None
        return Factors(payload.wire[: n * rank].view(1, n, rank), payload.wire[n * rank :].view(1, m, rank))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def register(registry: Registry) -> None:
    """Registers ``lowrank``."""
    registry.register(
        "lowrank",
        Registration(
            LowRankConfig,
            codec=LowRankCodec,
            points=frozenset({Point.PP_FWD, Point.PP_BWD}),
            advice="for all-reduces use powersgd",
        ),
    )
