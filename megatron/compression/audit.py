"""Audit of compressors: samples that compare a message plus its residual with the values to send.

The wrappers change nothing: they copy a part of the compressor's input and of its residual before a message, and the
same part of both results after it. The exact arithmetic between these copies is in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Codec, CodecTraits, Payload, Peers, Request, RoundCompressor
from megatron.compression.approximation import Approximation, dense
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback, ErrorFeedbackCodec
from megatron.compression.state import CompressorState

C = TypeVar("C", Codec, RoundCompressor)

SLICE = 1 << 16
"""Elements of a tensor that a sample copies."""


@dataclass(frozen=True)
class Sample:
    """A part of a tensor that was compressed, flat, in fp64.

    Args:
        intended: the compressor's input plus the residual of earlier messages.
        sent: the part as the receiver gets it, or this rank's contribution to a sum.
        residual: the residual afterwards; None without error feedback.
    """

    intended: Tensor
    sent: Tensor
    residual: Tensor | None

    def relative_error(self) -> float:
        """Norm of the difference between ``intended`` and ``sent`` plus ``residual``, over the norm of ``intended``.

        Not finite if one of them is not.
        """
        total = self.sent if self.residual is None else self.sent + self.residual
        norm = float(torch.linalg.vector_norm(self.intended))
        return float(torch.linalg.vector_norm(total - self.intended)) / (norm or 1.0)


Record = Callable[[Sample], None]


Copy = Callable[[Tensor], Tensor]
"""Function that copies a part of a tensor, or its mean over the tokens, flat, in fp64."""


def why_not_sampled(compressor: Codec | RoundCompressor) -> str | None:
    """Why messages of a compressor are not sampled; None if they are."""
    traits = compressor.traits
    if not isinstance(traits, CodecTraits):
        return None
    if traits.exact:
        return "it sends everything"
    if traits.shared or traits.samples:
        return "decoding changes its memory; both ends' memories are compared instead, as replicas are"
    return None


def _slice_copier(shape: torch.Size, number: int) -> Copy:
    """Make a function that copies the same part of all tensors of a shape; another part for each ``number``."""
    start = number * SLICE % max(shape.numel() - SLICE + 1, 1)
    return lambda x: x.detach().reshape(-1)[start : start + SLICE].to(torch.float64, copy=True)


def _mean_over_tokens(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).mean(dim=0, dtype=torch.float64)


class AuditedRounds(RoundCompressor):
    """A ``RoundCompressor`` that records a sample of its next reduction.

    Args:
        inner: the compressor.
        number: number of the sample, which determines the part.
        record: receives the sample; not called for exact reductions.
    """

    def __init__(self, inner: RoundCompressor, number: int, record: Record) -> None:
        super().__init__(inner.config)
        self.inner, self.traits, self.number, self.record = inner, inner.traits, number, record
        self.audited: RoundCompressor = inner.audited if isinstance(inner, AuditedRounds) else inner
        self._intended: Tensor | None = None

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        copy_slice, residual = _slice_copier(x.shape, self.number), state.get(RESIDUAL)
        self._intended = copy_slice(x)
        if isinstance(self.audited, ErrorFeedback) and residual is not None:
            self._intended.add_(copy_slice(residual), alpha=self.audited.decay)
        aggregate = yield from self.inner.rounds(x, state, peers)
        return aggregate

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        copy_slice, audited, intended = _slice_copier(x.shape, self.number), self.audited, self._intended
        sent = None
        if aggregate.local is not None:
            aggregated = isinstance(audited, ErrorFeedback) and audited.kind == "aggregate"
            contribution: Tensor | Approximation = aggregate.total if aggregated else aggregate.local
            sent = copy_slice(dense(contribution, x)) / (peers.size if aggregated else 1)
        self.inner.finalize(x, aggregate, state, peers)
        if sent is not None and intended is not None:
            residual = state.get(RESIDUAL) if isinstance(audited, ErrorFeedback) else None
            self.record(Sample(intended, sent, None if residual is None else copy_slice(residual)))


class AuditedCodec(Codec):
    """A ``Codec`` that records a sample of each message that it encodes. See ``AuditedRounds``.

    The codec must decode without changing its state.
    """

    def __init__(self, inner: Codec, number: int, record: Record) -> None:
        super().__init__(inner.config)
        self.inner, self.traits, self.number, self.record = inner, inner.traits, number, record
        self.audited: Codec = inner.audited if isinstance(inner, AuditedCodec) else inner

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        audited = self.audited
        copy_part = _slice_copier(x.shape, self.number)
        residual = None
        if isinstance(audited, ErrorFeedbackCodec):
            copy_part = _mean_over_tokens if audited.mean else copy_part
            residual = audited.fitting_residual(x.shape, state)
        intended = copy_part(x) if residual is None else copy_part(x) + copy_part(residual)
        payload = self.inner.encode(x, state, key)
        sent = copy_part(dense(audited.reconstruct(payload, x, state, key), x))
        residual = state.get(RESIDUAL) if isinstance(audited, ErrorFeedbackCodec) else None
        self.record(Sample(intended, sent, None if residual is None else copy_part(residual)))
        return payload

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return self.inner.empty_payload(shape, dtype, device, state, key)

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return self.inner.decode(payload, shape, dtype, state, key)


def audit(compressor: C, number: int, record: Record) -> C:
    """Wrap a compressor, so that it records samples. See ``AuditedRounds``."""
    if isinstance(compressor, Codec):
        return AuditedCodec(compressor, number, record)
    return AuditedRounds(compressor, number, record)
