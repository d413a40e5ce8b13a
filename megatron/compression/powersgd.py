"""PowerSGD: low-rank all-reduce of gradients (Vogels et al. 2019, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.approximation import Factors
from megatron.compression.factors import FactorFormat
from megatron.compression.ladder import Rung
from megatron.compression.linalg import matrix_shape, random_bases
from megatron.compression.options import MAX_SEED, opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState
from megatron.kernels.ops import orthonormalize


@dataclass(frozen=True)
class PowerSGDConfig:
    """Low-rank all-reduces of gradients."""

    rank: int = opt(4, "columns of the factors", minimum=1, scheduled=True)
    warm_start: bool = opt(True, "start each step from the Q of the last step")
    min_ratio: float = opt(
        1.0, "send a matrix uncompressed unless its factors are smaller by more than this ratio", minimum=0
    )
    seed: int = opt(714, "seed of the first factors", minimum=0, maximum=MAX_SEED)
    factors: Literal["fp32", "bf16", "fixpoint8", "fixpoint4"] = opt(
        "fp32", "how P and Q are sent: in full, in half precision, or quantized to 8 or 4 bits"
    )


class PowerSGD(RoundCompressor):
    """PowerSGD with a power iteration per step.

    For k stacked matrices M (n x m): P = sum of M Q, orthonormalize P, Q = sum of M^T P; the sum is P Q^T, and a rank's
    contribution is P (M^T P)^T. Sends r (n + m) instead of n m numbers.

    Errors of quantized factors: all ranks decode the same P and project exactly onto its orthonormal basis, so an
    error of P only tilts the subspace. But a row of P rounded to zero would zero a row of the sum: in an embedding's
    gradient, the rows of tokens absent from the batch are far smaller than other rows, and Adam's steps for them are
    equally large. P therefore uses 8-bit floats, which preserve small rows. An error of Q is an error of the sum. The
    rank that quantized Q includes the error in its contribution, so error feedback compensates for both.
    """

    traits = SumTraits(batched=True, steady=("draws", "messages"))
    config: PowerSGDConfig

    def __init__(self, config: PowerSGDConfig | None = None) -> None:
        super().__init__(config or PowerSGDConfig())
        self.basis = FactorFormat(self.config.factors, small_rows=True)
        self.factors = FactorFormat(self.config.factors)

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2:
            return False
        n, m = matrix_shape(shape)
        rank = min(n, m, self.config.rank)
        return n * m * 4 > self.config.min_ratio * (self.basis.nbytes(rank * n) + self.factors.nbytes(rank * m))

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        n, m = matrix_shape(x.shape[1:])
        matrices_knm = x.view(x.shape[0], n, m)
        rank = min(n, m, self.config.rank)
        q_kmr = state.get("q") if self.config.warm_start else None
        if q_kmr is None or q_kmr.shape[2] < rank:
            drawn_kmr = random_bases(x.shape[0], m, rank, self.config.seed, f"{n}x{m}/{state.count('draws')}", x)
            state.stage("draws", state.count("draws") + 1)
            q_kmr = drawn_kmr if q_kmr is None else torch.cat([q_kmr, drawn_kmr[:, :, q_kmr.shape[2] :]], dim=2)
        q_kmr = q_kmr[:, :, :rank]  # the rank may have fallen since the last step
        p_knr, _ = yield from self.basis.all_reduce(matrices_knm @ orthonormalize(q_kmr), state, peers)
        p_knr = orthonormalize(p_knr)
        q_kmr, local_q_kmr = yield from self.factors.all_reduce(matrices_knm.transpose(1, 2) @ p_knr, state, peers)
        if self.config.warm_start:
            state.stage("q", q_kmr)
        return Aggregate(total=Factors(p_knr, q_kmr), local=Factors(p_knr, local_q_kmr))


def _share_of_width(divisor: int) -> Callable[[int], str]:
    """Options of a rung whose rank is a share of the hidden size, with a warm-up of 4% of the run."""
    return lambda hidden_size: f"rank={max(hidden_size // divisor, 1)},factors=fixpoint8,warmup=0.04"


_LADDER = {
    Point.DP_GRAD: (
        Rung(
            _share_of_width(4),
            {250: (0.792, 0.67, 0.844), 1000: (0.642, 0.37, 0.353)},
            residual=3.34,
        ),
        Rung(
            _share_of_width(16),
            {250: (4.11, 3.905, 3.875), 1000: (2.714, 3.055, 2.718)},
            residual=7.03,
        ),
    ),
}


def register(registry: Registry) -> None:
    """Register ``powersgd``."""
    registry.register(
        "powersgd",
        Registration(
            PowerSGDConfig,
            rounds=PowerSGD,
            points=frozenset({Point.DP_GRAD, Point.EMBED_GRAD, Point.TP_FWD, Point.TP_BWD}),
            feedback={Point.DP_GRAD: "local", Point.EMBED_GRAD: "local"},
            alternatives=("lowrank", "fixpoint"),
            source="PowerSGD, Vogels et al. 2019, algorithm 1",
            example="dp-grad=powersgd,rank=32,factors=fixpoint8",
            ladder=_LADDER,
        ),
    )
