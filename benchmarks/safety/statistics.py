"""Student's t distribution, paired differences, and the equivalence test of two one-sided tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.convergence_cases import MARGIN


def t_probability(t: float, freedom: int) -> float:
    """Probability that Student's t is at most ``t``: the finite sums for whole degrees of freedom (Abramowitz and
    Stegun 26.7.3 and 26.7.4).

    Args:
        t: the value.
        freedom: degrees of freedom, at least 1.
    """
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = cosine if freedom % 2 else 1.0
    total = 0.0
    for k in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    central = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return 0.5 + central / 2


def t_quantile(probability: float, freedom: int) -> float:
    """Return the value that Student's t is at or below with a probability between 0 and 1."""
    low, high = -1.0, 1.0
    while t_probability(low, freedom) > probability:
        low *= 2
    while t_probability(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if t_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class PairedDifference:
    """Differences of pairs of runs.

    Args:
        percents: percent of loss above the dense run of the same seed, for each seed; at least two.
    """

    percents: Sequence[float]

    @property
    def mean(self) -> float:
        """Mean difference."""
        return statistics.fmean(self.percents)

    @property
    def freedom(self) -> int:
        """Degrees of freedom."""
        return len(self.percents) - 1

    @property
    def standard_error(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.percents) / math.sqrt(len(self.percents))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the two-sided interval of the mean."""
        half_width = t_quantile((1 + confidence) / 2, self.freedom) * self.standard_error
        return self.mean - half_width, self.mean + half_width

    def equivalence_p(self, margin: float = MARGIN) -> float:
        """Return the larger p-value of one-sided tests that the mean is below the margin and above its negative."""
        error = self.standard_error
        above, below = self.mean + margin, margin - self.mean
        if error == 0:
            return 0.0 if above > 0 and below > 0 else 1.0
        return 1 - min(t_probability(above / error, self.freedom), t_probability(below / error, self.freedom))

    def is_equivalent(self, margin: float = MARGIN) -> bool:
        """Return whether both tests reject at 5%; equivalently, the 90% interval lies within the margin."""
        return self.equivalence_p(margin) < 0.05

    @property
    def verdict(self) -> str:
        """The conclusion; never "no difference" from a large p."""
        low, high = self.interval()
        if self.is_equivalent():
            return f"equivalent within {MARGIN:g}%"
        if low > MARGIN or high < -MARGIN:
            return f"{'worse' if low > 0 else 'better'} by more than {MARGIN:g}%"
        if low > 0 or high < 0:
            return f"{'worse' if low > 0 else 'better'}; whether by more than {MARGIN:g}% is open"
        return "undecided: more seeds are needed"


def paired_difference(losses: Sequence[float], dense_losses: Sequence[float]) -> PairedDifference:
    """Differences of losses to those of the dense runs of the same seeds, in percent of these."""
    return PairedDifference([100 * (loss / dense - 1) for loss, dense in zip(losses, dense_losses, strict=True)])
