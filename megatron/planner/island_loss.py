"""Predicted loss increase of islands: a fit to measured losses, with its range of validity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.compression.spec import Spec

USUAL_SHARE = 1 / 3
"""Default share of synchronous iterations in a run, unless ``warmup`` is set."""


@dataclass(frozen=True)
class MeasuredLoss:
    """A measured loss increase over data parallelism with the same inner optimizer.

    Args:
        method: the preset of the point ``outer``.
        codec: the compressor, as named by ``codec_of``.
        every: H, inner steps of a round.
        islands: number of islands.
        percent: increase of the validation loss, in percent.
        share: share of synchronous iterations in the run.
        compressed: whether gradients were compressed in synchronous iterations.
    """

    method: str
    codec: str
    every: int
    islands: int
    percent: float
    share: float = USUAL_SHARE
    compressed: bool = False


MEASURED: tuple[MeasuredLoss, ...] = (
    MeasuredLoss("diloco", "identity", 5, 4, 1.91),
    MeasuredLoss("diloco", "identity", 20, 4, 1.18),
    MeasuredLoss("diloco", "identity", 50, 4, 2.91),
    MeasuredLoss("diloco", "identity", 20, 4, 2.23, share=0.1),
    MeasuredLoss("streaming", "fixpoint 4", 5, 4, 1.10),
    MeasuredLoss("streaming", "fixpoint 4", 20, 4, 1.12),
    MeasuredLoss("streaming", "fixpoint 4", 50, 4, 1.60),
    MeasuredLoss("streaming", "fixpoint 4", 20, 4, 1.24, compressed=True),
    MeasuredLoss("streaming", "fixpoint 4", 20, 4, 2.96, share=0.1),
    MeasuredLoss("streaming", "fixpoint 4", 20, 4, 2.97, share=0.1, compressed=True),
    MeasuredLoss("sparseloco", "chunked-topk 2", 5, 4, 2.93),
    MeasuredLoss("sparseloco", "chunked-topk 2", 20, 4, 3.46),
    MeasuredLoss("sparseloco", "chunked-topk 2", 50, 4, 4.26),
    MeasuredLoss("muloco", "fixpoint 4", 5, 4, 3.08),
    MeasuredLoss("muloco", "fixpoint 4", 20, 4, 2.86),
    MeasuredLoss("muloco", "fixpoint 4", 50, 4, 4.68),
)
"""Measured losses used for the fit: means over three seeds (docs/islands.md)."""

MEASURED_ON = "a GPT of 4 layers of width 64"
"""The model of ``MEASURED``; its penalties are assumed for every other model."""


Start = tuple[float, bool]
"""Share of synchronous iterations in a run, and whether their gradients are compressed."""


@dataclass(frozen=True)
class Method:
    """A published method of the DiLoCo family, as measured.

    Args:
        preset: the preset of the point ``outer``.
        codecs: compressors that the planner tries with the method.
        muon: the inner optimizer is Muon; otherwise any other.
        turns: fragments take turns; ``fragments`` gives their number.
    """

    preset: str
    codecs: tuple[str, ...]
    muon: bool = False
    turns: bool = False

    def spec(self, codec: str, every: int, start: Start, layers: int) -> str:
        """The ``--compress`` spec for a model of ``layers`` layers."""
        share, compressed = start
        turns = f",fragments={fragments(every, layers)}" if self.turns else ""
        warmup = "" if share == USUAL_SHARE else f",warmup={share:g}"
        in_step = ",in-step=compressed" if compressed else ""
        return f"outer={codec},outer-preset={self.preset},every={every}{turns}{warmup}{in_step}"


METHODS = (
    Method("diloco", ("identity", "fixpoint,bits=8", "fixpoint,bits=4")),
    Method("streaming", ("fixpoint,bits=4",), turns=True),
    Method("sparseloco", ("chunked-topk",)),
    Method("muloco", ("fixpoint,bits=4",), muon=True),
)
"""Methods that the planner tries."""

EVERY = (5, 10, 20, 30, 50, 100)
"""Inner steps of a round that the planner tries."""

_FRAGMENTS = {5: 1, 10: 2, 20: 4, 30: 3, 50: 5, 100: 10}
"""Number of fragments that take turns in a round, by steps of the round: a fragment every 5 or 10 steps."""


def fragments(every: int, layers: int) -> int:
    """Number of fragments that take turns at equal intervals in a round; each has at least a layer."""
    return max(n for n in range(1, min(_FRAGMENTS[every], layers) + 1) if every % n == 0)


def codec_of(spec: Spec) -> str:
    """Name of a spec's compressor, followed by its bits if it has that option."""
    bits = getattr(spec.options, "bits", None)
    return spec.name if bits is None else f"{spec.name} {bits:g}"


@dataclass(frozen=True)
class Penalty:
    """The predicted cost of islands.

    Args:
        percent: increase of the validation loss, in percent; never negative.
        beyond: descriptions of the settings outside the measured range; empty if there are none.
    """

    percent: float
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True)
class LossCurve:
    """The fit to one method: percent = factor x H ** power x exp(relief x (1/3 - share in step)).

    Args:
        factor, power, relief: the coefficients; ``relief`` is 0 where a single share was measured.
        compressed_factor: the factor for compressed gradients in synchronous iterations; at least ``factor``.
        rows: the measurements of the fit.
    """

    factor: float
    power: float
    relief: float
    compressed_factor: float
    rows: tuple[MeasuredLoss, ...]

    def percent(self, every: float, share: float, compressed: bool = False) -> float:
        """Loss increase of rounds of ``every`` steps, in percent."""
        factor = self.compressed_factor if compressed else self.factor
        return float(factor * every**self.power * np.exp(self.relief * (USUAL_SHARE - share)))


_POWERS = np.linspace(0.01, 2.0, 399)
_RELIEFS = np.linspace(0.0, 12.0, 241)


def fit(rows: Sequence[MeasuredLoss]) -> LossCurve:
    """Fit a method's curve by least squares: factors in closed form, power and relief by grid search.

    The power is positive and the other coefficients are not negative, so that longer rounds, fewer synchronous
    iterations, and compressed gradients never lower the cost. If every measurement beat data parallelism, the factors
    are zero.
    """
    every = np.array([float(row.every) for row in rows])
    share = np.array([row.share for row in rows])
    percent = np.array([row.percent for row in rows])
    reliefs = _RELIEFS if np.ptp(share) > 0 else np.zeros(1)
    powers = _POWERS[:, None, None]
    shapes = every**powers * np.exp(reliefs[:, None] * (USUAL_SHARE - share))
    compressed = np.array([row.compressed for row in rows])
    every_row = np.ones_like(compressed)
    pooled, exact, coded = (_factors(shapes, percent, mask) for mask in (every_row, ~compressed, compressed))
    separate = (exact <= coded) & compressed.any() & ~compressed.all()
    exact, coded = np.where(separate, exact, pooled), np.where(separate, coded, pooled)
    factors = np.where(compressed, coded[..., None], exact[..., None])
    errors = ((factors * shapes - percent) ** 2).sum(-1)
    best = np.unravel_index(int(errors.argmin()), errors.shape)
    power, relief = _POWERS[best[0]], reliefs[best[1]]
    return LossCurve(float(exact[best]), float(power), float(relief), float(coded[best]), tuple(rows))


def _factors(shapes: np.ndarray, percent: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The least-squares factor of each shape for the selected rows, clamped to zero."""
    squares = (shapes[..., rows] ** 2).sum(-1)
    return np.maximum((shapes[..., rows] * percent[rows]).sum(-1) / np.maximum(squares, 1e-30), 0.0)


class IslandLoss:
    """Predictor of the loss increase of islands.

    Args:
        rows: measured losses.
    """

    def __init__(self, rows: Sequence[MeasuredLoss] = MEASURED) -> None:
        methods = dict.fromkeys(row.method for row in rows)
        self.curves = {method: fit([row for row in rows if row.method == method]) for method in methods}

    def starts(self, method: str) -> list[Start]:
        """The measured (share of synchronous iterations, compressed) pairs of a method."""
        rows = self.curves[method].rows if method in self.curves else ()
        return sorted({(row.share, row.compressed) for row in rows})

    def penalty(
        self, method: str, codec: str, every: int, islands: int, share: float, compressed: bool = False
    ) -> Penalty | None:
        """Predict the cost of a method; None for a method without measurements.

        Args:
            method: the preset.
            codec: the compressor, as named by ``codec_of``.
            every: inner steps of a round.
            islands: number of islands.
            share: share of synchronous iterations in the run.
            compressed: whether gradients are compressed in synchronous iterations.
        """
        if method not in self.curves:
            return None
        curve = self.curves[method]
        lengths, counts, codecs = ({getattr(row, n) for row in curve.rows} for n in ("every", "islands", "codec"))
        beyond = []
        if not min(lengths) <= every <= max(lengths):
            beyond.append(f"H = {every}, measured from {min(lengths)} to {max(lengths)}")
        if islands not in counts:
            beyond.append(f"{islands} islands, measured with {_listed(counts)}")
        if codec not in codecs:
            beyond.append(f"{codec}, measured with {_listed(codecs)}")
        measured = [row.share for row in curve.rows]
        if not min(measured) - 0.01 <= share <= max(measured) + 0.01:
            beyond.append(f"{share:.0%} of the run in step, measured with {min(measured):.0%} to {max(measured):.0%}")
        if compressed and not any(row.compressed for row in curve.rows):
            beyond.append("gradients compressed in step, measured with exact ones")
        return Penalty(curve.percent(every, share, compressed), tuple(beyond))

    def of_spec(self, spec: Spec, islands: int, iterations: int) -> Penalty | None:
        """Predict the cost of a spec of ``outer`` in a run; None where no similar run was measured."""
        share = min(spec.activation.warmup_iters / iterations, 1.0)
        compressed = spec.outer.in_step == "compressed"
        if share == 1.0 and not compressed:
            return Penalty(0.0)
        return self.penalty(spec.preset, codec_of(spec), spec.outer.every, islands, share, compressed)

    def specs(self, muon: bool, layers: int) -> list[str]:
        """The specs of ``outer`` to try, given the inner optimizer and the model's number of layers."""
        return [
            method.spec(codec, every, start, layers)
            for method in METHODS
            if method.muon is muon
            for codec in method.codecs
            for every in EVERY
            for start in self.starts(method.preset)
        ]


def _listed(values: set[int] | set[str]) -> str:
    return ", ".join(str(value) for value in sorted(values))
