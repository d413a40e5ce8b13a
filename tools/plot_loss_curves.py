#!/usr/bin/env python3
"""Draws the losses of several runs over iterations, tokens and training time, and their differences to one of them.

    python tools/plot_loss_curves.py dense=dense/log.jsonl radius=radius/log.jsonl --baseline dense -o loss.png
    python tools/plot_loss_curves.py a.txt b.txt --x iterations,hours --smooth 50

A run is a file of --log-json-file or --log-txt-file (text logs of Megatron-LM and its forks have the same lines), with
a name before it if you like. Lines are training losses (means over --smooth points), markers are validation losses.
Training time is what the iterations took: pauses between restarts do not count. Also prints a table: the last losses,
and when each run had the last validation loss of the baseline. Losses that are not finite are gaps in the curves, and
are counted below the table.
"""

from __future__ import annotations

import argparse
import bisect
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(REPO))

from megatron.config.errors import UserError  # noqa: E402
from megatron.training.plots import new_figure, picture_format, save_figure  # noqa: E402
from megatron.training.sinks import read_records  # noqa: E402

AXES = {"iterations": "iteration", "tokens": "tokens", "hours": "hours of training"}
# A number with what comes after it, so that one that the run was killed in does not count.
_NUMBER = r"\s*(?P<loss>[-+.\w]+)[^-+.\w\n]"
_TRAIN = re.compile(
    r"iteration\s+(?P<iteration>\d+)/\s*\d+ \|.*?consumed samples:\s*(?P<samples>\d+).*?"
    r"elapsed time per iteration \((?P<unit>ms|s)\):\s*(?P<elapsed>[\d.]+)(?P<rest>.*)"
)
_LOSS = re.compile("lm loss:" + _NUMBER)
_SKIPPED = re.compile(r"number of skipped iterations:\s*(\d+)\D")
_VALID = re.compile(r"validation loss at iteration\s+(?P<iteration>\d+)\b.*?lm loss value:" + _NUMBER)


@dataclass
class Point:
    """A loss, in nats per token, and where it was seen; nan when it was not finite."""

    iteration: int
    loss: float
    tokens: float | None = None
    hours: float = 0.0

    def at(self, axis: str) -> float | None:
        """Its place on an axis."""
        return {"iterations": float(self.iteration), "tokens": self.tokens, "hours": self.hours}[axis]


@dataclass
class Run:
    """The curves of one run, in order."""

    name: str
    train: list[Point] = field(default_factory=list)
    valid: list[Point] = field(default_factory=list)


def read_run(word: str, seq_length: int | None) -> Run:
    """Reads NAME=FILE or FILE.

    Raises:
        UserError: when it cannot be read or holds no losses.
    """
    name, path = _named(word)
    run = Run(name or (path.parent.name if path.stem == "log" and path.parent.name else path.stem))
    try:
        rows = _from_json(path) if _is_json(path) else _from_text(path, seq_length)
    except OSError as error:
        raise UserError(f"{word}: {error.strerror}") from error
    hours = 0.0
    before = 0
    for kind, iteration, loss, tokens, seconds in rows:
        if kind == "validation":
            known = bisect.bisect_right([p.iteration for p in run.train], iteration)
            near = run.train[known - 1] if known else None
            at_tokens = tokens if tokens is not None or near is None else near.tokens
            run.valid.append(Point(iteration, loss, at_tokens, hours))
            continue
        hours += seconds * max(iteration - before, 0) / 3600.0
        before = iteration
        run.train.append(Point(iteration, loss, tokens, hours))
    if not run.train:
        raise UserError(f"{path}: no training losses; give a file of --log-json-file or --log-txt-file")
    return run


def _named(word: str) -> tuple[str, Path]:
    """The name (empty where none is given) and the file. A file may hold a = in its own name."""
    name, equals, path = word.partition("=")
    if not equals or Path(word).is_file():
        return "", Path(word)
    if not name or not path:
        raise UserError(f"{word}: no {'file after' if name else 'name before'} the =; write NAME=FILE")
    return name, Path(path)


_Row = tuple[str, int, float, float | None, float]


def _is_json(path: Path) -> bool:
    """Whether the first line that is not blank is an object's."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return next((line for line in file if line.strip()), "").lstrip().startswith("{")


def _from_json(path: Path) -> list[_Row]:
    """An event without a loss sums up iterations that were all skipped."""
    rows: list[_Row] = []
    for event in read_records(path):
        if event.get("kind") in ("train", "validation") and "lm_loss" in event:
            tokens = None if event.get("consumed_tokens") is None else event.number("consumed_tokens")
            seconds = event.number("seconds_per_iteration", 0.0)
            known = seconds if math.isfinite(seconds) else 0.0
            rows.append((event["kind"], event.iteration(), event.number("lm_loss"), tokens, known))
    return rows


def _from_text(path: Path, seq_length: int | None) -> list[_Row]:
    """A log that was continued from an earlier iteration replaces what came after that."""
    rows: list[_Row] = []
    before: int | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            if match := _TRAIN.search(line):
                iteration = int(match["iteration"])
                if before is not None and before >= iteration:
                    rows = [row for row in rows if row[1] < iteration]
                    before = None
                loss = _text_loss(match["rest"], 1 if before is None else iteration - before, place)
                before = iteration
                if loss is None:
                    continue
                tokens = None if seq_length is None else float(int(match["samples"]) * seq_length)
                seconds = _number(match["elapsed"], "elapsed time", place) / (1000.0 if match["unit"] == "ms" else 1.0)
                rows.append(("train", iteration, loss, tokens, seconds))
            elif match := _VALID.search(line):
                loss = _number(match["loss"], "lm loss", place)
                rows.append(("validation", int(match["iteration"]), loss, None, 0.0))
    return rows


def _text_loss(fields: str, iterations: int, place: str) -> float | None:
    """The loss of a training line's window of so many iterations; None when there is none, or the line is torn.

    A line leaves out a mean that is nan, and so it does where every iteration was skipped.
    """
    if match := _LOSS.search(fields):
        return _number(match["loss"], "lm loss", place)
    skipped = _SKIPPED.search(fields)
    return math.nan if skipped is not None and int(skipped[1]) < iterations else None


def _number(text: str, name: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise UserError(f"{place}: {name} {text} is not a number; correct or delete the line") from error
    return value if math.isfinite(value) else math.nan


def smoothed(points: Sequence[Point], width: int) -> list[float]:
    """Means over up to ``width`` points that end at each, of those that are finite; nan where the point is not."""
    means: list[float] = []
    sums, counts = [0.0], [0]
    for point in points:
        finite = math.isfinite(point.loss)
        sums.append(sums[-1] + (point.loss if finite else 0.0))
        counts.append(counts[-1] + finite)
        start = max(len(sums) - 1 - width, 0)
        means.append((sums[-1] - sums[start]) / (counts[-1] - counts[start]) if finite else math.nan)
    return means


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """The curve's value at x; None outside it, nan beside a gap."""
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    i = bisect.bisect_left(xs, x)
    if xs[i] == x:
        return ys[i]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def reached(run: Run, loss: float) -> Point | None:
    """The first validation at or below a loss."""
    return next((point for point in run.valid if point.loss <= loss), None)


def table(runs: Sequence[Run], baseline: Run | None, smooth: int) -> str:
    """Last losses, and when each run had the baseline's last validation loss."""
    lines = ["| run | iterations | training loss | validation loss | hours |", "|---|---|---|---|---|"]
    goal = baseline.valid[-1].loss if baseline is not None and baseline.valid else None
    if goal is not None and math.isnan(goal):
        goal = None
    if goal is not None and baseline is not None:
        lines[0] += f" {goal:.4f} after | hours | times {baseline.name} |"
        lines[1] += "---|---|---|"
    for run in runs:
        valid = f"{run.valid[-1].loss:.4f}" if run.valid else ""
        last = run.train[-1]
        cells = [run.name, str(last.iteration), f"{smoothed(run.train, smooth)[-1]:.4f}", valid, f"{last.hours:.3f}"]
        if goal is not None and baseline is not None:
            own, theirs = reached(run, goal), reached(baseline, goal)
            if own is None or theirs is None:
                cells += ["never", "", ""]
            else:
                cells += [
                    str(own.iteration),
                    f"{own.hours:.3f}",
                    f"{theirs.hours / own.hours:.2f}" if own.hours else "",
                ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def diverged(run: Run) -> list[str]:
    """A line for each kind of losses some of which are not finite."""
    lines = []
    for kind, points in (("training", run.train), ("validation", run.valid)):
        lost = [point.iteration for point in points if math.isnan(point.loss)]
        if lost:
            lines.append(
                f"{run.name}: {kind} losses that are not finite: {len(lost)}, the first at iteration {lost[0]}"
            )
    return lines


def draw(runs: Sequence[Run], baseline: Run | None, axes: Sequence[str], smooth: int, out: Path) -> None:
    """A column for each axis; losses above, differences to the baseline below.

    Raises:
        UserError: when an axis needs what a log does not say.
    """
    rows = 2 if baseline is not None else 1
    figure = new_figure(6.0 * len(axes), 4.2 * rows)
    panels = figure.subplots(rows, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        for number, run in enumerate(runs):
            colour = f"C{number}"
            _curve(panels[0][column], run, axis, smooth, colour)
            if baseline is not None and run is not baseline:
                _difference(panels[1][column], run, baseline, axis, smooth, colour)
        panels[0][column].set(xlabel=AXES[axis], ylabel="nats per token")
        panels[0][column].legend(frameon=False, fontsize=8)
        if baseline is not None:
            panels[1][column].axhline(0.0, color="black", linewidth=0.8)
            panels[1][column].set(xlabel=AXES[axis], ylabel=f"difference to {baseline.name}")
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    save_figure(figure, out)


def _places(run: Run, points: Sequence[Point], axis: str) -> list[float]:
    places = [point.at(axis) for point in points]
    if any(place is None for place in places):
        raise UserError(f"{run.name}: the text log does not say tokens; add --seq-length, or leave them out of --x")
    return [place for place in places if place is not None]


def _curve(panel: Any, run: Run, axis: str, smooth: int, colour: str) -> None:
    panel.plot(_places(run, run.train, axis), smoothed(run.train, smooth), color=colour, linewidth=1.2, label=run.name)
    if run.valid:
        style = {"color": colour, "marker": "o", "markersize": 4, "markerfacecolor": "white", "linestyle": "none"}
        panel.plot(_places(run, run.valid, axis), [point.loss for point in run.valid], **style)


def _difference(panel: Any, run: Run, baseline: Run, axis: str, smooth: int, colour: str) -> None:
    for points, theirs, style in (
        (run.train, baseline.train, {"linewidth": 1.2, "label": run.name}),
        (run.valid, baseline.valid, {"marker": "o", "markersize": 4, "markerfacecolor": "white", "linestyle": "none"}),
    ):
        width = smooth if points is run.train else 1
        base_x, base_y = _places(baseline, theirs, axis), smoothed(theirs, width)
        pairs = []
        for x, y in zip(_places(run, points, axis), smoothed(points, width), strict=True):
            base = interpolated(base_x, base_y, x)
            if base is not None:
                pairs.append((x, y - base))
        if pairs:
            panel.plot(*zip(*pairs, strict=True), color=colour, **style)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]FILE", help="logs")
    parser.add_argument("-o", "--output", default="loss.png", help="the picture; .png, .pdf or .svg (loss.png)")
    parser.add_argument("--baseline", help="name of the run that the others are compared with")
    parser.add_argument(
        "--x", default="iterations,tokens,hours", help="axes, comma-separated (iterations,tokens,hours)"
    )
    parser.add_argument("--smooth", type=int, default=10, help="training losses in a mean (10)")
    parser.add_argument("--seq-length", type=int, help="tokens of a sample, for text logs, which count samples")
    options = parser.parse_args(arguments)
    axes = options.x.split(",")
    try:
        picture_format(Path(options.output))
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise UserError(f"--x {unknown[0]}: choose from {', '.join(AXES)}")
        if options.smooth < 1:
            raise UserError(f"--smooth {options.smooth}: must be at least 1")
        runs = [read_run(word, options.seq_length) for word in options.runs]
        names = [run.name for run in runs]
        if len(set(names)) < len(names):
            raise UserError(f"two runs are named {max(names, key=names.count)}; write NAME=FILE")
        if options.baseline is not None and options.baseline not in names:
            raise UserError(f"--baseline {options.baseline}: the runs are {', '.join(names)}")
        baseline = next((run for run in runs if run.name == options.baseline), None)
        draw(runs, baseline, axes, options.smooth, Path(options.output))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    notes = [line for run in runs for line in diverged(run)]
    print("\n".join([table(runs, baseline, options.smooth), "", *notes, options.output]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
