"""Paired differences, and the equivalence test of two one-sided tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t

from benchmarks.convergence_cases import MARGIN


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
        half_width = float(t.ppf((1 + confidence) / 2, self.freedom)) * self.standard_error
        return self.mean - half_width, self.mean + half_width

    def equivalence_p(self) -> float:
        """Return the larger p-value of one-sided tests that the mean is below the margin and above its negative."""
        error = self.standard_error
        above, below = self.mean + MARGIN, MARGIN - self.mean
        if error == 0:
            return 0.0 if above > 0 and below > 0 else 1.0
        return float(t.sf(min(above, below) / error, self.freedom))

    def is_equivalent(self) -> bool:
        """Return whether both tests reject at 5%; equivalently, the 90% interval lies within the margin."""
        return self.equivalence_p() < 0.05

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
