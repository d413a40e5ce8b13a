"""The law of the gap: how the difference to dense grows with parameters and tokens, and what it predicts.

If all measured gaps are positive: gap = a N^b D^c, fitted to logarithms by least squares. Otherwise, since a power law
cannot change its sign: gap = a + b ln N + c ln D, in percent. Intervals are those of least squares, with Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t


@dataclass(frozen=True)
class Gap:
    """A measured gap.

    Args:
        parameters: number of parameters, N.
        tokens: tokens of training, D.
        percent: percent of loss above the dense run of the same seed.
    """

    parameters: int
    tokens: int
    percent: float


@dataclass(frozen=True)
class GapPrediction:
    """The gap of a size, in percent.

    Args:
        percent: the law's value.
        low, high: 95% interval of a single measurement; infinite without degrees of freedom.
    """

    percent: float
    low: float
    high: float


class GapLaw:
    """A law of the gap, fitted to measurements.

    Args:
        gaps: at least three gaps, of two numbers of parameters and two of tokens.
    """

    def __init__(self, gaps: Sequence[Gap]) -> None:
        self.is_power = all(gap.percent > 0 for gap in gaps)
        self._centers = tuple(
            sum(map(math.log, column)) / len(gaps)
            for column in zip(*((gap.parameters, gap.tokens) for gap in gaps), strict=True)
        )
        rows = np.array([self._row(gap.parameters, gap.tokens) for gap in gaps])
        values = np.array([self._value(gap.percent) for gap in gaps])
        self.freedom = len(gaps) - rows.shape[1]
        if np.linalg.matrix_rank(rows) < rows.shape[1]:
            raise ValueError("a law needs gaps of at least two numbers of parameters and two of tokens")
        self.coefficients = np.linalg.lstsq(rows, values, rcond=None)[0]
        squares = float(((values - rows @ self.coefficients) ** 2).sum())
        self._variance = squares / self.freedom if self.freedom else math.inf
        self._inverse = np.linalg.inv(rows.T @ rows)

    def _value(self, percent: float) -> float:
        return math.log(percent) if self.is_power else percent

    def _row(self, parameters: float, tokens: float) -> list[float]:
        return [1.0, math.log(parameters) - self._centers[0], math.log(tokens) - self._centers[1]]

    def exponents(self) -> list[tuple[float, float]]:
        """Return the coefficients of N and of D, each with the half width of its 95% interval."""
        half_widths = self._quantile() * np.sqrt(np.diag(self._inverse)) * self._deviation()
        return [(float(self.coefficients[i]), float(half_widths[i])) for i in (1, 2)]

    def _quantile(self) -> float:
        return float(t.ppf(0.975, self.freedom)) if self.freedom else math.inf

    def _deviation(self) -> float:
        return math.sqrt(self._variance)

    def predict(self, parameters: int, tokens: int, measurements: int = 1) -> GapPrediction:
        """Return the gap of a size, with the interval of the mean of some measurements there."""
        row = np.array(self._row(parameters, tokens))
        middle = float(row @ self.coefficients)
        if not self.freedom:
            low, high = -math.inf, math.inf
        else:
            spread = math.sqrt(float(row @ self._inverse @ row) + 1 / measurements)
            half_width = self._quantile() * self._deviation() * spread
            low, high = middle - half_width, middle + half_width
        if self.is_power:
            return GapPrediction(*(math.exp(min(value, 700.0)) for value in (middle, low, high)))
        return GapPrediction(middle, low, high)

    @property
    def formula(self) -> str:
        """The law with its coefficients, and the half widths of their 95% intervals."""
        (b, b_half), (c, c_half) = self.exponents()
        n, d = (math.exp(center) for center in self._centers)
        first = float(self.coefficients[0])
        if self.is_power:
            return (
                f"gap = {math.exp(first):.3g}% x (N / {n:,.0f})^({b:+.2f} ± {b_half:.2f}) "
                f"x (D / {d:,.0f})^({c:+.2f} ± {c_half:.2f})"
            )
        return (
            f"gap = {first:+.3f}% + ({b:+.3f} ± {b_half:.3f})% x ln(N / {n:,.0f}) "
            f"+ ({c:+.3f} ± {c_half:.3f})% x ln(D / {d:,.0f})"
        )
