"""Quantized Adam: all-reduces momenta instead of gradients, quantized at both ends (AQ-SGD's data parallelism).

The structure of 1-bit Adam (Tang et al. 2021, algorithm 1) at 1 to 8 bits, as used by Wang et al. 2022: after a warm-up
with ordinary Adam, the second moments are frozen, and every rank sends its momentum plus its last quantization error.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron.compression.api import Aggregate, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.approximation import Approximation, write
from megatron.compression.error_feedback import ErrorFeedback
from megatron.compression.fixpoint import FixpointRounds, FixpointSumConfig
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.schedule import Activation
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class QuantizedAdamConfig(FixpointSumConfig):
    """All-reduces of momenta with two-sided error feedback, under Adam with frozen second moments."""

    beta: float = opt(0.9, "decay of the momentum, equal to --adam-beta1", minimum=0, maximum=0.999)


@dataclass(frozen=True)
class _MomentumGradient(Approximation):
    """The gradient (M - share m) / (1 - beta), for the exchanged momentum M and the previous momentum m."""

    exchanged: Tensor | Approximation
    momentum: Tensor | None
    share: float
    beta: float

    def write_to(self, out: Tensor) -> None:
        write(self.exchanged, out)
        if self.momentum is not None:
            out.sub_(self.momentum, alpha=self.share)
        out.div_(1.0 - self.beta)


@dataclass(frozen=True)
class _MomentumAggregate(Aggregate):
    """An aggregate of gradients, with the exchanged aggregate of momenta."""

    exchanged: Aggregate


class QuantizedAdam(RoundCompressor):
    """All-reduce of momenta that returns the gradient that produces them.

    With g_i a rank's gradient, m the shared momentum and n ranks: u_i = beta m / n + (1 - beta) g_i + error_i is
    quantized, exchanged, summed, and the sum quantized again and gathered: M. The result (M - beta m) / (1 - beta)
    updates any optimizer's momentum to M, so the tied embedding's all-reduce and the optimizer need no changes. It
    carries the error of M times 1 / (1 - beta), so gradients are clipped before the all-reduce. The errors of both
    steps stay on the ranks that made them (``FixpointRounds`` under ``ErrorFeedback``). m is 0 when the warm-up ends.
    The optimizer freezes its second moments, which the quantization noise would inflate.
    """

    config: QuantizedAdamConfig
    traits = SumTraits(freezes_variance=True, clips_first=True, steady=("messages",))

    def __init__(self, config: QuantizedAdamConfig | None = None) -> None:
        super().__init__(config or QuantizedAdamConfig())
        self.exchange = ErrorFeedback(FixpointRounds(self.config))
        self.traits = replace(self.traits, levels=self.exchange.traits.levels)

    def problem(self, activation: Activation) -> str:
        if activation.first_stages is not None or activation.last_stages is not None:
            return "stages: quantized-adam changes the update rule, which all stages must share; leave it out"
        if not activation.warms_up:
            return "quantized-adam divides by what a warm-up measures; add warmup=N iterations, some hundreds"
        return ""

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        if flags["optimizer"] != "adam":
            return "it is a variant of Adam; use --optimizer adam, or dp-grad=fixpoint"
        beta = flags["adam_beta1"]
        if self.config.beta != beta:
            return f"beta={self.config.beta:g} must be --adam-beta1 {beta:g}; write beta={beta:g}"
        return ""

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        beta, momentum = self.config.beta, state.get("momentum")
        x.mul_(1.0 - beta)
        if momentum is not None:
            x.add_(momentum, alpha=beta / peers.size)
        # Every rank keeps the whole momentum, even if it reads only its shard of the gradients.
        exchanged = yield from self.exchange.rounds(x, state, replace(peers, sharded=False))
        assert exchanged.local is not None
        return _MomentumAggregate(
            _MomentumGradient(exchanged.total, momentum, beta, beta),
            _MomentumGradient(exchanged.local, momentum, beta / peers.size, beta),
            exchanged,
        )

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        assert isinstance(aggregate, _MomentumAggregate)
        self.exchange.finalize(x, aggregate.exchanged, state, peers)
        write(aggregate.total, x)
        write(aggregate.exchanged.total, state.buffer("momentum", x))


def register(registry: Registry) -> None:
    """Register ``quantized-adam``."""
    registry.register(
        "quantized-adam",
        Registration(
            QuantizedAdamConfig,
            rounds=QuantizedAdam,
            points=frozenset({Point.DP_GRAD}),
            no_feedback="has a residual of its own",
            alternatives=("fixpoint,error-feedback=on", "fixpoint"),
            needs="only with --optimizer adam, beta equal to --adam-beta1, all stages, and a warm-up",
            source="AQ-SGD, Wang et al. 2022; 1-bit Adam, Tang et al. 2021, algorithm 1",
            example="dp-grad=quantized-adam,bits=8,warmup=0.1",
        ),
    )
