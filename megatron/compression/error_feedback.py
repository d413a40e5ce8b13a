"""Error feedback: the unsent part of a gradient is added to the next gradient.

Seide et al. 2014; Karimireddy et al. 2019. This is the only implementation of residuals in the code base.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Codec, Payload, Peers, Request, RoundCompressor
from megatron.compression.approximation import subtract
from megatron.compression.health import measure, squared_norms
from megatron.compression.identity import IdentityRounds
from megatron.compression.results import check_aggregate
from megatron.compression.state import CompressorState, combine_keys

RESIDUAL = "residual"

SumResidual = Literal["local", "aggregate"]
MessageResidual = Literal["lazy", "lazy-reset", "lazy-mean"]


@dataclass(frozen=True)
class _MeasuredAggregate(Aggregate):
    """An aggregate with the norms measured by error feedback.

    Args:
        inner: the compressor's own aggregate.
        gradient_k, input_k: squared norms of the gradient, and of the gradient with the residual.
    """

    inner: Aggregate
    gradient_k: Tensor
    input_k: Tensor


class ErrorFeedback(RoundCompressor):
    """A ``RoundCompressor`` with a residual: the unsent part of a tensor, which is added to the next input.

    Args:
        inner: the compressor; it must not change its input, unless it returns no ``local``.
        kind: "local" keeps the input minus this rank's contribution to the sum. "aggregate" keeps the input minus the
            mean over the ranks, as in PowerSGD's published code (Vogels et al. 2019, algorithm 2); the ranks' residuals
            then differ by as much as their gradients.
        decay: factor of the residual when it is added; below 1, part of it is forgotten (SparseLoCo, Sarfi et al.
            2025).
    """

    def __init__(self, inner: RoundCompressor, kind: SumResidual = "local", decay: float = 1.0) -> None:
        super().__init__(inner.config)
        self.inner = inner
        self.kind = kind
        self.decay = decay
        self.traits = inner.traits

    def launch_signature(self, state: CompressorState) -> Hashable:
        return combine_keys(state.layout(self.traits.steady), self.inner.launch_signature(state))

    def observe(self, update: Tensor, state: CompressorState) -> None:
        self.inner.observe(update, state)

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        return self.inner.should_compress(shape)

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        residual = state.get(RESIDUAL)
        gradient_k = input_k = squared_norms(x, self.traits.batched)
        if residual is not None:
            x.add_(residual, alpha=self.decay)
            input_k = squared_norms(x, self.traits.batched)
        if self.kind == "aggregate":
            peers = replace(peers, sharded=False)  # the residual needs the whole sum
        inner = check_aggregate((yield from self.inner.rounds(x, state, peers)), x, self.inner)
        return _MeasuredAggregate(inner.total, inner.local, inner, gradient_k, input_k)

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        assert isinstance(aggregate, _MeasuredAggregate)
        residual = state.buffer(RESIDUAL, x)
        if aggregate.local is None:
            residual.zero_()
        else:
            residual.copy_(x)
            if self.kind == "aggregate":
                subtract(aggregate.total, residual, 1.0 / peers.size)
            else:
                subtract(aggregate.local, residual)
        residual_k = squared_norms(residual, self.traits.batched)
        state.stage_health(measure(state.health, aggregate.gradient_k, aggregate.input_k, residual_k))
        self.inner.finalize(x, aggregate.inner, state, peers)


class LastResidual(ErrorFeedback):
    """An exact reduction that also flushes the residual, for a tensor that is no longer compressed.

    Args:
        compressor: the compressor that left the residual.
        kind: kind of the residual.
    """

    def __init__(self, compressor: RoundCompressor, kind: SumResidual) -> None:
        super().__init__(IdentityRounds(), kind)
        self.traits = replace(self.traits, batched=compressor.traits.batched)

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        super().finalize(x, aggregate, state, peers)
        del state.tensors[RESIDUAL]


class ErrorFeedbackCodec(Codec):
    """A ``Codec`` whose sender keeps a residual.

    For activation gradients of the pipeline, this is lazy error propagation (Optimus-CC, Song et al. 2023, section
    5.2): the error of a micro-batch is added to the next compressed micro-batch, across iterations.

    When the sequence length changes, errors stay at their positions, and those beyond the last position wrap around to
    the first, so the sum of errors is conserved.

    Args:
        inner: the codec.
        kind: "lazy" keeps the error of each token, also for the next iteration; "lazy-reset" forgets it when an
            iteration begins; "lazy-mean" keeps its mean over the tokens. The next micro-batch has other tokens at the
            same positions, so per-token errors only add noise to its gradients, while their mean is the part that the
            layers below would have summed.
    """

    def __init__(self, inner: Codec, kind: MessageResidual = "lazy") -> None:
        super().__init__(inner.config)
        self.inner = inner
        self.kind = kind
        self.mean = kind == "lazy-mean"
        self.traits = inner.traits

    def should_compress(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        return self.inner.should_compress(shape, dtype)

    def begin_step(self, state: CompressorState) -> None:
        if self.kind == "lazy-reset":
            state.tensors.pop(RESIDUAL, None)
        self.inner.begin_step(state)

    def launch_signature(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        return combine_keys(state.layout(self.traits.steady), self.inner.launch_signature(shape, state, keys))

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return self.inner.empty_payload(shape, dtype, device, state, key)

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        gradient_1 = input_1 = squared_norms(x, False)
        residual = self.fitting_residual(x.shape, state)
        if residual is None:
            corrected = x.clone(memory_format=torch.contiguous_format)
        else:
            # A rollback needs the committed residual.
            in_place = not self.mean and residual is not state.tensors.get(RESIDUAL)
            corrected = residual.add_(x) if in_place else (x + residual).contiguous()
            input_1 = squared_norms(corrected, False)
        payload = self.inner.encode(corrected, state, key)
        subtract(self.inner.reconstruct(payload, corrected, state, key), corrected)
        new_residual = corrected.reshape(-1, corrected.shape[-1]).mean(dim=0) if self.mean else corrected
        state.stage(RESIDUAL, new_residual)
        state.stage_health(measure(state.health, gradient_1, input_1, squared_norms(new_residual, False)))
        return payload

    def fitting_residual(self, shape: torch.Size, state: CompressorState) -> Tensor | None:
        """The newest residual, resized to the shape's sequence length; None if its other dimensions differ."""
        residual = state.get(RESIDUAL)
        if residual is None or residual.shape == (shape[-1:] if self.mean else shape):
            return residual
        if self.mean or residual.dim() != len(shape) or residual.shape[1:] != shape[1:]:
            return None
        resized = residual.new_zeros(shape)
        for segment in residual.split(shape[0]):
            resized[: segment.shape[0]].add_(segment)
        return resized

    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        return self.inner.decode(payload, shape, dtype, state, key)
