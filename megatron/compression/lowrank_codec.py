"""Low-rank messages: a matrix is sent as two thin factors (Optimus-CC, Song et al. 2023, section 5.1)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.approximation import Approximation, Factors, dense
from megatron.compression.factors import FactorFormat, wire_dtype
from megatron.compression.linalg import matrix_shape, random_bases
from megatron.compression.options import MAX_SEED, opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState
from megatron.kernels.ops import orthonormalize


@dataclass(frozen=True)
class LowRankConfig:
    """Two thin factors of a message, by a power iteration."""

    rank: int = opt(16, "columns of the factors", minimum=1, scheduled=True)
    warm_start: bool = opt(True, "start each message from the previous one's factor")
    basis: Literal["tokens", "channels"] = opt(
        "tokens",
        "basis onto which messages are projected: over their tokens, as published, which gives tokens with small "
        "gradients the errors of others; or over their channels, with which each token loses a part of itself",
    )
    seed: int = opt(714, "seed of the first factor", minimum=0, maximum=MAX_SEED)
    factors: Literal["fp32", "bf16", "fixpoint8", "fixpoint4"] = opt(
        "fp32", "how P and Q are sent: in full, in half precision, or quantized to 8 or 4 bits"
    )


class LowRankCodec(Codec):
    """Codec that sends P (n x r, orthonormal) and Q = M^T P (m x r) for the matrix M (tokens x hidden) in a message.

    With a basis of channels, it sends Q = orth(M^T P), and M Q in place of P.

    With lossy formats, both ends orthonormalize the decoded basis, and the other factor is computed from that basis:
    projection onto any orthonormal basis is exact, so an error of the basis only tilts the subspace.

    If the factors would not be smaller than the matrix, the message is the matrix itself.
    """

    config: LowRankConfig

    def __init__(self, config: LowRankConfig | None = None) -> None:
        super().__init__(config or LowRankConfig())
        self.factors = FactorFormat(self.config.factors)

    def _nbytes(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> int:
        n, m = matrix_shape(shape)
        return self.factors.nbytes(rank * n, dtype) + self.factors.nbytes(rank * m, dtype)

    def _rank(self, shape: torch.Size) -> int | None:
        """Rank of the factors; None if the factors are not smaller than the matrix."""
        n, m = matrix_shape(shape)
        rank = min(n, m, self.config.rank)
        return rank if self._nbytes(rank, shape, torch.float32) < n * m * 4 else None

    def should_compress(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        rank = self._rank(shape)
        return rank is not None and self._nbytes(rank, shape, dtype) < shape.numel() * dtype.itemsize

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        rank = self._rank(shape)
        if rank is None:
            return Payload(torch.empty(shape, dtype=dtype, device=device))
        return Payload(self.factors.empty(self._nbytes(rank, shape, dtype), dtype, device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        rank, (n, m) = self._rank(x.shape), matrix_shape(x.shape)
        if rank is None:
            return Payload(x.detach().clone(memory_format=torch.contiguous_format))
        matrix_1nm = x.reshape(1, n, m).to(wire_dtype(x.dtype))
        q_1mr = state.get("q") if self.config.warm_start else None
        if q_1mr is not None and q_1mr.shape[1] == m and q_1mr.shape[2] > rank:
            q_1mr = q_1mr[:, :, :rank]
        elif q_1mr is None or q_1mr.shape != (1, m, rank):
            q_1mr = random_bases(1, m, rank, self.config.seed, f"{n}x{m}", matrix_1nm)
        p_1nr = orthonormalize(matrix_1nm @ orthonormalize(q_1mr))
        if self.config.basis == "tokens":
            p_wire = self.factors.encode(p_1nr)
            q_1mr = matrix_1nm.transpose(1, 2) @ self._decode_basis(p_wire, (1, n, rank), matrix_1nm.dtype)
            q_wire = self.factors.encode(q_1mr)
        else:
            q_wire = self.factors.encode(orthonormalize(matrix_1nm.transpose(1, 2) @ p_1nr))
            q_1mr = self._decode_basis(q_wire, (1, m, rank), matrix_1nm.dtype)
            p_wire = self.factors.encode(matrix_1nm @ q_1mr)
        if self.config.warm_start:
            state.stage("q", q_1mr)
        return Payload(torch.cat([p_wire, q_wire]))

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        factors = self._read_factors(payload, shape, dtype)
        if factors is None:
            return payload.wire
        return dense(factors, payload.wire.new_empty(shape, dtype=wire_dtype(dtype))).to(dtype)

    def reconstruct(self, payload: Payload, x: Tensor, state: CompressorState, key: Hashable) -> Tensor | Approximation:
        return self._read_factors(payload, x.shape, x.dtype) or payload.wire

    def _decode_basis(self, wire: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """The orthonormal factor as computed by the receiver."""
        decoded = self.factors.decode(wire, shape, dtype)
        return decoded if self.factors.exact else orthonormalize(decoded)

    def _read_factors(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Factors | None:
        """Factors in a message; None if the matrix itself was sent."""
        rank, (n, m) = self._rank(shape), matrix_shape(shape)
        if rank is None:
            return None
        split = self.factors.nbytes(n * rank, dtype) // payload.wire.element_size()
        decode_p, decode_q = self._decode_basis, self.factors.decode
        if self.config.basis == "channels":
            decode_p, decode_q = decode_q, decode_p
        p_1nr = decode_p(payload.wire[:split], (1, n, rank), dtype)
        return Factors(p_1nr, decode_q(payload.wire[split:], (1, m, rank), dtype))


def register(registry: Registry) -> None:
    """Register ``lowrank``."""
    registry.register(
        "lowrank",
        Registration(
            LowRankConfig,
            codec=LowRankCodec,
            points=frozenset({Point.PP_FWD, Point.PP_BWD}),
            alternatives=("powersgd", "fixpoint"),
            source="Optimus-CC, Song et al. 2023, section 5.1",
            example="pp-backward=lowrank,rank=16,when=epilogue",
        ),
    )
