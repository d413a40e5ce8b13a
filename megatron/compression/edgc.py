"""PowerSGD ranks that follow the entropy of the gradient (EDGC, arXiv 2511.10333).

During training, the entropy of gradients decreases, and fewer columns suffice for the same share of a gradient. The
entropy is averaged over windows of iterations, and at each window's end a rule maps it to the rank for the next window.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.base.option import derived
from megatron.compression.api import Controller, Op, Reduced, Request, Trial
from megatron.compression.linalg import matrix_shape
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.registry import Registration, Registry
from megatron.compression.schedule import Activation
from megatron.compression.stage_times import StageTimes, ranks_to_try
from megatron.kernels.ops import finite_norm, sample_histogram

_BINS = 1000
_GRID = 4096

_PROBE_EVERY = 10
"""Interval in iterations between attempts to measure times."""

_WAIT_ITERATIONS = 3
"""Iterations, up to and including the measurement, in which the ranks wait for each other. The median is used, since a
single iteration may be an outlier, such as the first iteration after a restart."""


@dataclass(frozen=True)
class EDGCConfig(PowerSGDConfig):
    """PowerSGD whose rank follows the entropy of the gradient."""

    rank: int = opt(64, "the highest rank, and the first one", minimum=2)
    min_rank: int = opt(0, "the lowest rank; 0 means a quarter of the highest", minimum=0)
    window: int = opt(1000, "iterations between changes of the rank", minimum=2)
    sample_every: int = opt(10, "iterations between measurements of the entropy", minimum=1)
    sample_share: int = opt(4, "one of every N elements of the gradient is measured", minimum=1)
    rule: Literal["linear", "formula"] = opt(
        "linear", "by the change in entropy, as in the published code; or by the error that the theory keeps constant"
    )
    max_step: int = opt(4, "largest change of the rank at a time", minimum=1)
    warmup_ends: Literal["iterations", "error"] = opt(
        "iterations",
        "after the iterations of warmup; or later, by the error: once the lowest rank loses less than the "
        "highest one did at the start of the run",
    )
    stage_slack: float | None = derived(
        "measured",
        "share by which the rank of each later pipeline stage, whose reduction begins earlier, is higher; "
        "without it, ranks are fitted to measured times, and sums are exact where that is faster",
        minimum=0,
        maximum=10,
    )

    @property
    def limits(self) -> tuple[int, int]:
        """Lowest and highest rank."""
        return self.min_rank or max(self.rank // 4, 1), self.rank


def differential_entropy(x: Tensor, stride: int = 1) -> float:
    """Differential entropy in nats of the finite elements, from a histogram of 1000 bins over their range.

    NaN if no element is finite. Only every ``stride``-th element is sampled. The logarithm of the bin width is added,
    without which the result would not depend on the gradient's scale.
    """
    counts_b, range_2 = sample_histogram(x, stride, _BINS)
    low, high = range_2.tolist()
    if low > high:
        return math.nan
    if low == high:
        return -math.inf
    counts = counts_b.double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum()) + math.log((high - low) / _BINS)


def residual_shares(n: int, m: int) -> Tensor:
    """g(r) for r = 0..min(n, m): relative error of the best rank-r approximation of an n x m matrix of noise.

    g(r)^2 is the energy share of all but the r largest eigenvalues, according to the Marchenko-Pastur law.
    """
    small, large = sorted((n, m))
    aspect = small / large
    low, high = (1 - math.sqrt(aspect)) ** 2, (1 + math.sqrt(aspect)) ** 2
    edges = torch.linspace(low, high, _GRID + 1, dtype=torch.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    density = ((high - middle) * (middle - low)).clamp_min(0).sqrt() / middle
    count, energy = density.cumsum(0), (density * middle).cumsum(0)
    count, energy = count / count[-1], energy / energy[-1]
    count_shares = 1.0 - torch.arange(small + 1, dtype=torch.float64) / small
    places = torch.searchsorted(count, count_shares.clamp(max=1.0)).clamp(max=_GRID - 1)
    shares = energy[places].clone()
    shares[0], shares[-1] = 1.0, 0.0
    return shares.sqrt()


class RankByEntropy:
    """Rule that maps windows of entropies to a rank; equal entropies give equal ranks on all processes.

    Args:
        config: options of the compressor.
        shape: (n, m) of the matrices, for ``rule=formula``.
    """

    def __init__(self, config: EDGCConfig, shape: tuple[int, int] = (0, 0)) -> None:
        self.config = config
        self.shape = shape
        self.rank = config.rank
        self.means: list[float] = []
        self.sum = 0.0
        self.count = 0

    def add_entropy(self, entropy: float) -> None:
        """Add a measurement; nonfinite values are ignored."""
        if math.isfinite(entropy):
            self.sum += entropy
            self.count += 1

    def close_window(self, moves: bool = True) -> int:
        """Close the window and return the rank of the next window. The first two nonempty windows set the reference.

        Args:
            moves: False during the warm-up: its windows are measured, but do not change the rank.
        """
        measured = self.count > 0
        if measured:  # keep the first two windows, which are the reference, and the last two
            self.means = [*self.means[:2], *self.means[2:][-1:], self.sum / self.count]
        self.sum, self.count = 0.0, 0
        if moves and measured and len(self.means) >= 3:
            low, high = self.config.limits
            target = float(self.config.rank)
            if self.config.rule == "linear":
                # min + (max - min) x change of this window / change of the first two.
                first = abs(self.means[1] - self.means[0])
                change = abs(self.means[-1] - self.means[-2])
                target = low + (high - low) * min(change / first, 1.0) if first else float(high)
            else:
                # The rank with the error that the highest rank had in the first window: g(r) e^H = g(r0) e^H0.
                shares = residual_shares(*self.shape)
                start = shares[min(self.config.rank, len(shares) - 1)]
                allowed = float(start) * math.exp(self.means[0] - self.means[-1])
                fitting = (shares <= allowed).nonzero()
                target = float(fitting[0]) if len(fitting) else target
            step = min(max(target - self.rank, -self.config.max_step), self.config.max_step)
            even = 2 * round((self.rank + step) / 2)
            self.rank = int(min(max(even, low), high))
        return self.rank

    def state_dict(self) -> dict[str, float | list[float]]:
        """State as plain numbers."""
        return {"rank": float(self.rank), "means": list(self.means), "sum": self.sum, "count": float(self.count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from ``state_dict``; clamp the rank to this run's limits."""
        (low, high), means = self.config.limits, state["means"]
        if not isinstance(means, list):
            raise TypeError(f"means is a {type(means).__name__} instead of a list")
        window_means, total, count = [float(mean) for mean in means], float(state["sum"]), int(state["count"])
        if not all(map(math.isfinite, [*window_means, total])) or count < 0:
            raise ValueError("means, sum and count of EDGC's window are not those of a run")
        self.rank = min(max(int(state["rank"]), low), high)
        self.means, self.sum, self.count = window_means, total, count


def _is_probe_iteration(iteration: int) -> bool:
    """Whether to measure in an iteration (0-based); never in the first few iterations."""
    return (iteration + 1) % _PROBE_EVERY == 0


class RankController(Controller):
    """Controller that measures the entropy of the first stage's gradients and sets the rank by ``RankByEntropy``.

    The formula uses the shape of the first stage's largest matrices; all ranks learn this shape after the first step.

    A probe measures, once, the times of an exact reduction and of reductions with several ranks. Later stages finish
    their backward pass earlier, so their reduction may take longer than the first stage's; the ranks wait for each
    other in a few iterations to measure how much longer. Until the probe, all stages have the same rank.

    With ``warmup-ends=error``, the probe also measures the error of the highest rank, and each window's end the error
    of the lowest rank. All stages reduce exactly until the latter error is smaller.
    """

    def __init__(self, config: EDGCConfig) -> None:
        self.config = config
        self.rule = RankByEntropy(config)
        self.times: StageTimes | None = None
        self.warm = config.warmup_ends == "iterations"
        self.measured: dict[str, float] = {}
        self._knows_shape = False
        self._waited_s: list[float] = []

    def needs_wait_times(self, iteration: int) -> bool:
        return self._wants_times and any(_is_probe_iteration(iteration + later) for later in range(_WAIT_ITERATIONS))

    @property
    def _wants_times(self) -> bool:
        return self.config.stage_slack is None and self.times is None

    @property
    def _wants_error(self) -> bool:
        return not self.warm and "first_error" not in self.measured

    def options(self, stage: int) -> Mapping[str, float] | None:
        if not self.warm:
            return None
        if self.times is not None:
            rank = self.times.rank(stage, self.rule.rank, self.config.limits)
            return None if rank is None else {"rank": rank}
        slack = 1.0 + (self.config.stage_slack or 0.0) * stage
        return {"rank": min(round(self.rule.rank * slack), self.config.rank)}

    def after_reduction(self, reduced: Reduced) -> Generator[Request | Trial, Tensor, None]:
        if not self._knows_shape:
            # All ranks get the shape as the mean over the first stage's ranks, where it is equal.
            matrices = [matrix_shape(shape) for shape in reduced.shapes]
            n, m = max(matrices, key=lambda shape: shape[0] * shape[1], default=(1, 1))
            total_n, total_m, ranks = (yield Request(torch.tensor([n, m, 1]) * (reduced.stage == 0))).tolist()
            self.rule.shape = (total_n // ranks, total_m // ranks)
            self._knows_shape = True
        if self.needs_wait_times(reduced.iteration):
            self._waited_s = [*self._waited_s, reduced.ahead_s][-_WAIT_ITERATIONS:]
        probes = (self._wants_times or self._wants_error) and _is_probe_iteration(reduced.iteration)
        if probes and (yield from self._all_finite(reduced)):
            if self._wants_times and len(self._waited_s) == _WAIT_ITERATIONS:
                ranks = ranks_to_try(self.config.rank)
                row = [float(reduced.stage), median(self._waited_s)]
                for options in (None, *({"rank": rank} for rank in ranks)):
                    seconds, _, _ = (yield Trial(options)).tolist()
                    row.append(seconds)
                rows = yield Request(torch.tensor(row, dtype=torch.float64), Op.GATHER)
                self.times = StageTimes.from_rows(ranks, rows.tolist())
            if self._wants_error:
                self.measured["first_error"] = yield from self._error(self.config.rank, reduced)
        if (reduced.iteration + 1) % self.config.sample_every == 0:
            # The mean over the first stage's tensors on all its ranks, weighted by size.
            measured = [(differential_entropy(flat, self.config.sample_share), flat.numel()) for flat in reduced.flats]
            finite = [(entropy, count) for entropy, count in measured if math.isfinite(entropy)]
            local_sums = [sum(h * n for h, n in finite), float(sum(n for _, n in finite))]
            pair = yield Request(torch.tensor(local_sums, dtype=torch.float64) * (reduced.stage == 0))
            total, count = pair.tolist()
            entropy = (total / count if count else math.nan) - math.log(reduced.scale)
            self.rule.add_entropy(entropy)
            if math.isfinite(entropy):
                self.measured["entropy"] = entropy
        if (reduced.iteration + 1) % self.config.window == 0:
            self.rule.close_window(moves=reduced.compressed and self.warm)
            may_end = reduced.compressed and not self.warm and "first_error" in self.measured
            if may_end and (yield from self._all_finite(reduced)):
                error = yield from self._error(self.config.limits[0], reduced)
                self.measured["last_error"] = error
                self.warm = error < self.measured["first_error"]

    def _error(self, rank: int, reduced: Reduced) -> Generator[Request | Trial, Tensor, float]:
        """Relative error of the first stage's gradients at a rank."""
        _, error, norm = (yield Trial({"rank": rank}, repeats=1)).tolist()
        pair = yield Request(torch.tensor([error, norm], dtype=torch.float64) * (reduced.stage == 0))
        error, norm = pair.tolist()
        return math.sqrt(error / norm) if norm > 0 else 0.0

    def _all_finite(self, reduced: Reduced) -> Generator[Request, Tensor, bool]:
        """Whether all gradients of all ranks are finite."""
        finite = bool(reduced.flats) and all(bool(finite_norm(flat)[1]) for flat in reduced.flats)
        num_bad = yield Request(torch.tensor([0.0 if finite else 1.0]))
        return float(num_bad) == 0.0

    def figures(self, stages: Sequence[int]) -> Mapping[str, float]:
        """Entropy, the errors that end the warm-up, ranks (0: exact), and the seconds measured by the probe."""
        by_stage = {stage: self.options(stage) for stage in stages}
        ranks = {stage: 0.0 if options is None else float(options["rank"]) for stage, options in by_stage.items()}
        values = {**self.measured, "rank": float(self.rule.rank)}
        for stage, rank in ranks.items():
            values[f"rank_of_stage_{stage}"] = rank
            if self.times is not None:
                exact = self.times.exact_s[stage]
                values[f"seconds_of_stage_{stage}"] = self.times.seconds(stage, int(rank)) if rank else exact
                values[f"exact_seconds_of_stage_{stage}"] = exact
                values[f"head_start_of_stage_{stage}"] = self.times.ahead_s[stage]
        return values

    def on_layout_change(self) -> None:
        self.times = None

    def state_dict(self) -> Mapping[str, Any]:
        times = None if self.times is None else asdict(self.times)
        return {**self.rule.state_dict(), "measured": dict(self.measured), "warm": self.warm, "times": times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        times = state.get("times")  # absent in states of earlier versions
        restored = None if times is None else StageTimes.from_state(times)
        measured = {str(name): float(value) for name, value in dict(state.get("measured", {})).items()}
        if not all(map(math.isfinite, measured.values())):
            raise ValueError("what EDGC has measured is not that of a run")
        self.rule.load_state_dict(state)
        covers_rank = restored is not None and restored.ranks[-1] >= self.config.rank
        self.times = restored if covers_rank and self.config.stage_slack is None else None
        self.warm = self.config.warmup_ends == "iterations" or state.get("warm") is True
        self.measured = measured


class EDGC(PowerSGD):
    """PowerSGD with a ``RankController``."""

    config: EDGCConfig

    def problem(self, activation: Activation) -> str:
        if self.config.min_rank > self.config.rank:
            return f"min-rank={self.config.min_rank} is above rank={self.config.rank}, the greatest; lower it"
        if self.config.warmup_ends == "error" and activation.last_stages is not None:
            return (
                f"warmup-ends=error: is about the first stage, which stages=last:{activation.last_stages} leaves out; "
                "give stages=first:N, or the iterations of a warmup"
            )
        return ""

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        if flags["deterministic_mode"] and self.config.stage_slack is None:
            return "--deterministic-mode: it decides by measured times, which no two runs share; give stage-slack=0"
        return ""

    def tuned_limits(self) -> Mapping[str, tuple[float, float]]:
        return {"rank": self.config.limits}

    def controller(self) -> Controller:
        return RankController(self.config)


def register(registry: Registry) -> None:
    """Register ``edgc``."""
    registry.register(
        "edgc",
        Registration(
            EDGCConfig,
            rounds=EDGC,
            points=frozenset({Point.DP_GRAD}),
            feedback={Point.DP_GRAD: "local"},
            alternatives=("powersgd,rank=64@0/32@1000", "lowrank,rank=64@0/32@1000", "fixpoint"),
            source="EDGC, arXiv 2511.10333",
            example="dp-grad=edgc,rank=64,warmup=0.1",
        ),
    )
