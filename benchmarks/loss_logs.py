"""Losses from the logs of runs."""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.base.errors import UserError
from megatron.training.plots import of_final_draw
from megatron.training.records import read_records

# A number with the next character, so that a number cut short by a kill does not count.
_NUMBER = r"\s*(?P<loss>[-+.\w]+)[^-+.\w\n]"
_TRAIN = re.compile(
    r"iteration\s+(?P<iteration>\d+)/\s*\d+ \|.*?consumed samples:\s*(?P<samples>\d+).*?"
    r"elapsed time per iteration \((?P<unit>ms|s)\):\s*(?P<elapsed>[\d.]+)(?P<fields>.*)"
)
_LOSS = re.compile("lm loss:" + _NUMBER)
_SKIPPED = re.compile(r"number of skipped iterations:\s*(\d+)\D")
_VALID = re.compile(r"validation loss at iteration\s+(?P<iteration>\d+)\b(?P<draw>[^|]*)\|.*?lm loss value:" + _NUMBER)


_Row = tuple[str, int, float, float | None, float]
"""Kind (train, validation or final), iteration, loss, tokens, seconds of an iteration."""


@dataclass
class LossPoint:
    """A loss in nats per token (nan when it was not finite) and its position."""

    iteration: int
    loss: float
    tokens: float | None = None
    hours: float = 0.0

    def at(self, axis: str) -> float | None:
        """Return the coordinate on an axis."""
        return {"iterations": float(self.iteration), "tokens": self.tokens, "hours": self.hours}[axis]


@dataclass
class LossCurves:
    """The loss curves of a run, in order.

    Args:
        name: name of the run.
        train: training losses, means since the previous point.
        valid: validation losses during training, each on the next samples.
        final: losses at the end of training, on the first samples of the validation set.
    """

    name: str
    train: list[LossPoint] = field(default_factory=list)
    valid: list[LossPoint] = field(default_factory=list)
    final: list[LossPoint] = field(default_factory=list)

    @property
    def interval(self) -> float:
        """Number of iterations between training losses."""
        return _spacing(self.train)

    @property
    def eval_interval(self) -> float:
        """Number of iterations between evaluations."""
        return _spacing(self.valid)


def _spacing(points: Sequence[LossPoint]) -> float:
    """Return the median distance of points; the distance of a single point from the beginning; 0 without points."""
    iterations = [point.iteration for point in points]
    steps = [b - a for a, b in itertools.pairwise(iterations)] or iterations
    return float(statistics.median(steps)) if steps else 0.0


def read_run(word: str, seq_length: int | None) -> LossCurves:
    """Read NAME=FILE or FILE.

    Raises:
        UserError: when it cannot be read or holds no losses.
    """
    name, path = split_name(word)
    run = LossCurves(name or (path.parent.name if path.stem == "log" and path.parent.name else path.stem))
    try:
        rows = _from_json(path) if _is_json(path) else _from_text(path, seq_length)
    except OSError as error:
        raise UserError(f"{word}: {error.strerror}") from error
    train = [row for row in rows if row[0] == "train"]
    if not train:
        raise UserError(f"{path}: no training losses; give a file of --log-json-file or --log-txt-file")
    first = train[0][1]
    window = train[1][1] - first if len(train) > 1 else first  # the first is taken to be as long as the second
    hours, before = 0.0, max(first - window, 0)
    starts = LossPoint(before, math.nan, None, 0.0)
    for _, iteration, loss, tokens, seconds in train:
        hours += seconds * max(iteration - before, 0) / 3600.0
        before = iteration
        run.train.append(LossPoint(iteration, loss, tokens, hours))
    for kind, iteration, loss, tokens, _ in rows:
        if kind != "train":
            curve = run.valid if kind == "validation" else run.final
            curve.append(_evaluation_point([starts, *run.train], iteration, loss, tokens))
    return run


def _evaluation_point(train: Sequence[LossPoint], iteration: int, loss: float, tokens: float | None) -> LossPoint:
    """Return a point of an evaluation, with time (and missing tokens) interpolated between training losses."""
    iterations = [point.iteration for point in train]
    clamped = min(max(iteration, iterations[0]), iterations[-1])
    hours = interpolate(iterations, [point.hours for point in train], clamped)
    counted = [point for point in train if point.tokens is not None]
    if tokens is None and counted:
        iterations = [0, *(point.iteration for point in counted)]
        counts = [0.0, *(point.tokens or 0.0 for point in counted)]
        tokens = interpolate(iterations, counts, min(iteration, iterations[-1]))
    return LossPoint(iteration, loss, tokens, hours or 0.0)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """Interpolate a curve at x; None outside its range, nan next to a gap."""
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    i = bisect.bisect_left(xs, x)
    if xs[i] == x:
        return ys[i]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def split_name(word: str) -> tuple[str, Path]:
    """Split NAME=FILE; the name is empty without it, and a file's name may contain =."""
    name, equals, path = word.partition("=")
    if not equals or Path(word).is_file():
        return "", Path(word)
    if not name or not path:
        raise UserError(f"{word}: no {'file after' if name else 'name before'} the =; write NAME=FILE")
    return name, Path(path)


def _is_json(path: Path) -> bool:
    """Return whether the first line with text is a JSON object."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return next((line for line in file if line.strip()), "").lstrip().startswith("{")


def _from_json(path: Path) -> list[_Row]:
    """Read a JSON-lines log. An event without a loss is a window of skipped iterations."""
    rows: list[_Row] = []
    for event in read_records(path):
        if event.get("kind") in ("train", "validation") and "lm_loss" in event:
            kind = "final" if event["kind"] == "validation" and of_final_draw(event) else event["kind"]
            tokens = None if event.get("consumed_tokens") is None else event.number("consumed_tokens")
            seconds = event.number("seconds_per_iteration", 0.0)
            seconds = seconds if math.isfinite(seconds) else 0.0
            rows.append((kind, event.iteration(), event.number("lm_loss"), tokens, seconds))
    return rows


def _from_text(path: Path, seq_length: int | None) -> list[_Row]:
    """Read a text log. After a restart from an earlier iteration, the new lines replace the old."""
    rows: list[_Row] = []
    before: int | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            location = f"{path}:{number}"
            if match := _TRAIN.search(line):
                iteration = int(match["iteration"])
                if before is not None and before >= iteration:
                    rows = [row for row in rows if row[1] < iteration]
                    before = None
                loss = _text_loss(match["fields"], 1 if before is None else iteration - before, location)
                before = iteration
                if loss is None:
                    continue
                tokens = None if seq_length is None else float(int(match["samples"]) * seq_length)
                seconds = _number(match["elapsed"], "elapsed time", location) / (
                    1000.0 if match["unit"] == "ms" else 1.0
                )
                rows.append(("train", iteration, loss, tokens, seconds))
            elif match := _VALID.search(line):
                loss = _number(match["loss"], "lm loss", location)
                # "on 640-sample draw from test set", or in other forks "on validation set": at the end of training.
                draw = match["draw"].split()
                kind = "final" if draw else "validation"
                if draw[-2:] != ["test", "set"]:
                    rows.append((kind, int(match["iteration"]), loss, None, 0.0))
    return rows


def _text_loss(fields: str, iterations: int, location: str) -> float | None:
    """Return the mean loss of a training line's window of iterations; None for a window without a step or a torn line.

    A line omits a mean that is nan, and the mean of a window in which every iteration was skipped.
    """
    if match := _LOSS.search(fields):
        return _number(match["loss"], "lm loss", location)
    skipped = _SKIPPED.search(fields)
    return math.nan if skipped is not None and int(skipped[1]) < iterations else None


def _number(text: str, name: str, location: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise UserError(f"{location}: {name} {text} is not a number; correct or delete the line") from error
    return value if math.isfinite(value) else math.nan
