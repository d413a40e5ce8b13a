"""Settings of compressors that ``--compress auto`` may choose, with their measured cost in loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.compression.points import Point

MAX_RUNGS = 8
"""Maximum number of rungs of a compressor at a point: all sets of rungs are predicted."""

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
        increases: increase of the validation loss, in percent, of each run with this setting over the uncompressed run
            of the same seed. At least two.
        residual: mean norm of the residual over that of the gradient in those runs; None without error feedback. Used
            at ``dp-grad``.
    """

    options: str | Callable[[int], str]
    increases: tuple[float, ...]
    residual: float | None = None

    def __post_init__(self) -> None:
        if len(self.increases) < 2 or not all(map(math.isfinite, self.increases)):
            raise ValueError(f"a rung has the increases of at least two runs, not {self.increases}")
        if self.residual is not None and not (0.0 < self.residual < math.inf):
            raise ValueError(f"the residual of a rung is a positive share of the gradient, not {self.residual}")

    def spec(self, point: Point, name: str, hidden_size: int) -> str:
        """The value of ``--compress``."""
        options = self.options if isinstance(self.options, str) else self.options(hidden_size)
        return f"{point.value}={name}{options and ','}{options}"

    @property
    def highest_increase(self) -> float:
        """Upper end of the interval of the mean increase, in percent; at least 0."""
        return max(interval_of_mean(self.increases)[1], 0.0)

    @property
    def mean_increase(self) -> float:
        """Mean increase, in percent; at least 0."""
        return max(statistics.fmean(self.increases), 0.0)
