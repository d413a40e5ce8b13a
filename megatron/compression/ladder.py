"""Settings of compressors that ``--compress auto`` may choose, with their measured cost in loss."""

from __future__ import annotations

import math
import statistics
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron.base.errors import UserError, describe_failure
from megatron.compression.points import Point

MAX_RUNGS = 8
"""Maximum number of rungs of a compressor at a point: all sets of rungs are predicted."""

MODEL_SPREAD = 0.5
"""Share by which the cost on another model or layout may exceed the measured one.

Gradients on three combinations of model and layout predict 42% (one-sided, 95%): docs/results/loss.md.
"""

MAX_NOISE = 1.0 / math.sqrt(3.0)
"""Largest norm of quantization noise over that of the gradient that ``--compress auto`` allows, whatever the budget.

With more noise, training on quantized gradients hardly gains (Chmiel et al. 2025, "FP4 All the Way", arXiv 2505.19115).
"""

_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Quantiles of Student's t distribution at 95% (one-sided), for 1, 2, ... degrees of freedom."""


def interval_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """The two-sided 90% confidence interval of a mean; each end is that of a one-sided 95% interval.

    If both ends are within a margin of zero, two one-sided tests at the level of 5% show equivalence within it.

    Args:
        values: at least two independent measurements.
    """
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half_width = _T_95[min(len(values) - 2, len(_T_95) - 1)] * deviation / math.sqrt(len(values))
    return mean - half_width, mean + half_width


@dataclass(frozen=True)
class Rung:
    """A setting of a compressor, with its measured cost in loss.

    Args:
        options: the setting, as in a spec after the compressor's name; or a function of the hidden size that
            returns it.
        increases: by the number of iterations of a run, the increase of the validation loss, in percent, of each run
            with this setting over the uncompressed run of the same seed. At least two for each length.
        residual: mean norm of the residual over that of the gradient in the longest of those runs; None without error
            feedback. Used at ``dp-grad``.

    Between two measured lengths, costs are interpolated over the logarithm of the iterations; beyond them, they are
    those of the nearest. A compressor delays training by some iterations, so a short run, which ends while the loss
    still falls fast, may pay more.
    """

    options: str | Callable[[int], str]
    increases: Mapping[int, tuple[float, ...]]
    residual: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.increases, Mapping) or not self.increases or min(self.increases) < 1:
            raise ValueError(
                "a rung has increases by the number of iterations, such as {1000: (0.31, 0.12)}, not "
                f"{self.increases!r}"
            )
        for values in self.increases.values():
            if len(values) < 2 or not all(map(math.isfinite, values)):
                raise ValueError(f"a rung has the increases of at least two runs, not {values}")
        if self.residual is not None and not (0.0 < self.residual < math.inf):
            raise ValueError(f"the residual of a rung is a positive share of the gradient, not {self.residual}")

    def spec(self, point: Point, name: str, hidden_size: int) -> str:
        """The value of ``--compress``.

        Raises:
            UserError: when the function of the options fails.
        """
        try:
            options = self.options if isinstance(self.options, str) else self.options(hidden_size)
        except Exception as error:
            failure = describe_failure(error)
            raise UserError(f"{name}: options of its ladder at {point.value} cannot be read: {failure}") from error
        return f"{point.value}={name}{options and ','}{options}"

    def highest_increase(self, iterations: int | None) -> float:
        """Upper end of the increase in a run of a length on another model, in percent; at least 0.

        Above the mean are, added in quadrature, half of its confidence interval and the spread between models.
        """
        mean = self.mean_increase(iterations)
        end = self._interpolate(lambda values: interval_of_mean(values)[1], iterations)
        if end <= 0.0:
            return 0.0
        return mean + math.hypot(end - mean, MODEL_SPREAD * mean)

    def mean_increase(self, iterations: int | None) -> float:
        """Mean increase in a run of a length, in percent; at least 0."""
        return max(self._interpolate(statistics.fmean, iterations), 0.0)

    def _interpolate(self, summary: Callable[[Sequence[float]], float], iterations: int | None) -> float:
        """Interpolate a summary of the measured increases; that of the longest runs if the length is unknown."""
        lengths = sorted(self.increases)
        iterations = min(max(iterations or lengths[-1], lengths[0]), lengths[-1])
        upper = bisect(lengths, iterations, hi=len(lengths) - 1)
        longer, shorter = lengths[upper], lengths[max(upper - 1, 0)]
        share = math.log(iterations / shorter) / math.log(longer / shorter) if longer > shorter else 0.0
        return (1 - share) * summary(self.increases[shorter]) + share * summary(self.increases[longer])
