"""Quantised Adam: momenta are summed instead of gradients, quantised at both ends (AQ-SGD's data parallelism).

The structure of 1-bit Adam (Tang et al. 2021, algorithm 1) at 1 to 8 bits, as Wang et al. 2022 use it: after a warm-up
of ordinary Adam its second moments are frozen, and every rank sends its momentum with the error of the last one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from megatron.compression.api import Aggregate, Peers, Request, RoundCompressor
from megatron.compression.error_feedback import ErrorFeedback
from megatron.compression.fixpoint import FixpointConfig, FixpointRounds
from megatron.compression.options import opt
from megatron.compression.state import CompressorState


@dataclass(frozen=True)
class QuantizedAdamConfig(FixpointConfig):
    """Sums of momenta with two-sided error feedback, under Adam with frozen second moments."""

    beta: float = opt(0.9, "decay of the momentum, that of --adam-beta1", minimum=0, maximum=0.999)


class QuantizedAdam(RoundCompressor):
    """Exchanges momenta, and answers with the gradient that makes them.

    With g_i a rank's gradient, m the shared momentum and n ranks: u_i = beta m / n + (1 - beta) g_i + error_i is
    quantised, exchanged, summed, and the sum quantised again and gathered: M. The answer (M - beta m) / (1 - beta)
    makes any optimizer's momentum move as M does, so that clipping, norms and the tied embedding's exchange stay what
    they are. The errors of both steps stay where they were made (``FixpointRounds`` under ``ErrorFeedback``). m is 0
    when the warm-up ends. The optimizer freezes its second moments, which the quantisation's noise would inflate.
    """

    config: QuantizedAdamConfig
    freezes_variance = True

    def __init__(self, config: QuantizedAdamConfig | None = None) -> None:
        super().__init__(config or QuantizedAdamConfig())
        self.exchange = ErrorFeedback(FixpointRounds(self.config))

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        beta, momentum = self.config.beta, state.get("momentum")
        x.mul_(1.0 - beta)
        if momentum is not None:
            x.add_(momentum, alpha=beta / peers.size)
        aggregate = yield from self.exchange.rounds(x, state, peers)
        total, local = aggregate.total.clone(), aggregate.dense_local(x)
        state.stage("momentum", aggregate.total)
        if momentum is not None:
            total.sub_(momentum, alpha=beta)
            local = local.sub(momentum, alpha=beta / peers.size)
        return Aggregate(total.div_(1.0 - beta), local / (1.0 - beta))
