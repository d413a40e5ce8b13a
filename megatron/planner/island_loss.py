"""What islands cost of the loss: a fit to measured losses, and what it can be asked without extrapolating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.compression.spec import Spec

USUAL_SHARE = 1 / 3
"""Share of the run in step unless ``warmup`` says otherwise."""


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of one measured case beside that of data parallelism with the same inner optimizer.

    Args:
        method: the preset of the point ``outer``.
        codec: its compressor, as ``codec_of`` names it.
        every: H, inner steps of a round.
        islands: number of islands.
        percent: what it cost of the validation loss, in percent.
        share: share of the run in step.
        compressed: whether the gradients in step were compressed.
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
"""The losses that the fit is of: means over three seeds (docs/islands.md)."""

MEASURED_ON = "a GPT of 4 layers of width 64"
"""The model of ``MEASURED``, whose penalties every other model's are taken to be."""


Start = tuple[float, bool]
"""Share of a run in step, and whether its gradients are compressed."""


@dataclass(frozen=True)
class Method:
    """A published member of the family, as it was measured.

    Args:
        preset: its preset.
        codecs: compressors that the planner tries with it.
        muon: its inner optimizer is Muon; else any other.
        turns: its fragments take turns, as many as ``fragments`` says.
    """

    preset: str
    codecs: tuple[str, ...]
    muon: bool = False
    turns: bool = False

    def spec(self, codec: str, every: int, start: Start, layers: int) -> str:
        """The spec of ``--compress`` for a model of so many layers."""
        share, compressed = start
        parts = f",fragments={fragments(every, layers)}" if self.turns else ""
        warmup = "" if share == USUAL_SHARE else f",warmup={share:g}"
        in_step = ",in-step=compressed" if compressed else ""
        return f"outer={codec},outer-preset={self.preset},every={every}{parts}{warmup}{in_step}"


METHODS = (
    Method("diloco", ("identity", "fixpoint,bits=8", "fixpoint,bits=4")),
    Method("streaming", ("fixpoint,bits=4",), turns=True),
    Method("sparseloco", ("chunked-topk",)),
    Method("muloco", ("fixpoint,bits=4",), muon=True),
)
"""What the planner tries."""

EVERY = (5, 10, 20, 30, 50, 100)
"""Inner steps of a round that the planner tries."""

_FRAGMENTS = {5: 1, 10: 2, 20: 4, 30: 3, 50: 5, 100: 10}
"""Fragments of a round of so many steps, where they take turns: each has one of 5 steps or of 10."""


def fragments(every: int, layers: int) -> int:
    """Fragments of a round that take turns at equal distances; each has a layer at least."""
    return max(n for n in range(1, min(_FRAGMENTS[every], layers) + 1) if every % n == 0)


def codec_of(spec: Spec) -> str:
    """The name of a spec's compressor, with its bits where it has any."""
    bits = getattr(spec.options, "bits", None)
    return spec.name if bits is None else f"{spec.name} {bits:g}"


@dataclass(frozen=True)
class Penalty:
    """The predicted cost of islands.

    Args:
        percent: of the validation loss; never below zero.
        beyond: what of it was not measured, in words; empty where all was.
    """

    percent: float
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True)
class LossCurve:
    """The fit to one method: percent = factor x H ** power x exp(relief x (1/3 - share in step)).

    Args:
        factor, power, relief: the coefficients; ``relief`` is 0 where only one share was measured.
        compressed_factor: the factor where gradients in step are compressed; at least the other one.
        rows: what it is fitted to.
    """

    factor: float
    power: float
    relief: float
    compressed_factor: float
    rows: tuple[MeasuredLoss, ...]

    def percent(self, every: float, share: float, compressed: bool = False) -> float:
        """The cost of rounds of ``every`` steps."""
        factor = self.compressed_factor if compressed else self.factor
        return float(factor * every**self.power * np.exp(self.relief * (USUAL_SHARE - share)))


_POWERS = np.linspace(0.01, 2.0, 399)
_RELIEFS = np.linspace(0.0, 12.0, 241)


def fit(rows: Sequence[MeasuredLoss]) -> LossCurve:
    """Fits a method's curve by least squares: the factors in closed form, of the best of a grid of the others.

    The power is above zero and the others are not below, so that more steps in a round, and fewer in step, never cost
    less; neither do compressed gradients. Where all were better than data parallelism, the factors are zero.
    """
    every = np.array([float(row.every) for row in rows])
    share = np.array([row.share for row in rows])
    percent = np.array([row.percent for row in rows])
    reliefs = _RELIEFS if np.ptp(share) > 0 else np.zeros(1)
    powers = _POWERS[:, None, None]
    shapes = every**powers * np.exp(reliefs[:, None] * (USUAL_SHARE - share))
    compressed = np.array([row.compressed for row in rows])
    every_row = np.ones_like(compressed)
    both, exact, coded = (_factors(shapes, percent, of) for of in (every_row, ~compressed, compressed))
    apart = (exact <= coded) & compressed.any() & ~compressed.all()
    exact, coded = np.where(apart, exact, both), np.where(apart, coded, both)
    factors = np.where(compressed, coded[..., None], exact[..., None])
    errors = ((factors * shapes - percent) ** 2).sum(-1)
    best = np.unravel_index(int(errors.argmin()), errors.shape)
    power, relief = _POWERS[best[0]], reliefs[best[1]]
    return LossCurve(float(exact[best]), float(power), float(relief), float(coded[best]), tuple(rows))


def _factors(shapes: np.ndarray, percent: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The best factor of each shape for some of the rows, not below zero."""
    squares = (shapes[..., rows] ** 2).sum(-1)
    return np.maximum((shapes[..., rows] * percent[rows]).sum(-1) / np.maximum(squares, 1e-30), 0.0)


class IslandLoss:
    """Predicts what islands cost of the loss.

    Args:
        rows: measured losses.
    """

    def __init__(self, rows: Sequence[MeasuredLoss] = MEASURED) -> None:
        methods = dict.fromkeys(row.method for row in rows)
        self.curves = {method: fit([row for row in rows if row.method == method]) for method in methods}

    def starts(self, method: str) -> list[Start]:
        """The ways to begin that a method was measured with."""
        rows = self.curves[method].rows if method in self.curves else ()
        return sorted({(row.share, row.compressed) for row in rows})

    def penalty(
        self, method: str, codec: str, every: int, islands: int, share: float, compressed: bool = False
    ) -> Penalty | None:
        """The cost of a method; None where nothing of it was measured.

        Args:
            method: its preset.
            codec: its compressor, as ``codec_of`` names it.
            every: inner steps of a round.
            islands: number of islands.
            share: share of the run in step.
            compressed: whether its gradients are compressed.
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
        """The cost of a spec of ``outer`` in a run of so many iterations; None where nothing like it was measured."""
        share = min(spec.activation.warmup_iters / iterations, 1.0)
        compressed = spec.outer.in_step == "compressed"
        if share == 1.0 and not compressed:
            return Penalty(0.0)
        return self.penalty(spec.preset, codec_of(spec), spec.outer.every, islands, share, compressed)

    def specs(self, muon: bool, layers: int) -> list[str]:
        """The specs of ``outer`` that are tried with an inner optimizer, for a model of so many layers."""
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
