"""Draws the losses of several runs over iterations, tokens and training time, and their differences to a baseline.

    python tools/plot_loss_curves.py dense=dense/log.jsonl radius=radius/log.jsonl --baseline dense -o loss.png
    python tools/plot_loss_curves.py a.txt b.txt --x iterations,hours --smooth 50

A run is a file of --log-json-file or --log-txt-file (text logs of Megatron-LM and its forks have the same lines),
optionally with a name before it. Lines are training losses, averaged over --smooth points of the run that logs least
often, and over as many iterations of the others (by default ten points, but at most a tenth of the shortest run).
Hollow markers are validation losses, filled markers losses at the end of training, on other samples; each kind is only
compared with its own kind. Training time (--x hours, in a suitable unit) is the time of the iterations in the log,
without pauses between restarts. Also prints a table of the last losses, and of when each run reached the last
validation loss of the baseline. Non-finite losses are gaps in the curves, and are counted below the table.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loss_logs import LossCurves, LossPoint, interpolate, read_run, split_name
from megatron.base.errors import UserError
from megatron.base.figures import curve_style, label_iterations, new_figure, picture_format, save_figure, time_unit
from megatron.base.markdown import markdown_table

AXES = ("iterations", "tokens", "hours")


def span_of(runs: Sequence[LossCurves], smooth: int) -> float:
    """Number of iterations in a mean, equal for all runs so that no curve lags behind another."""
    return smooth * max(run.interval for run in runs)


def default_smooth(runs: Sequence[LossCurves]) -> int:
    """Default of --smooth: ten points, but at most a tenth of the shortest run."""
    shortest = min(run.train[-1].iteration - run.train[0].iteration for run in runs)
    return min(10, max(1, int(shortest / 10 / span_of(runs, 1))))


def smooth_losses(points: Sequence[LossPoint], span: float) -> list[float]:
    """Means of the finite losses over the ``span`` iterations before each point; nan where the point is not finite."""
    means: list[float] = []
    sums, counts = [0.0], [0]
    start = 0
    for point in points:
        finite = math.isfinite(point.loss)
        sums.append(sums[-1] + (point.loss if finite else 0.0))
        counts.append(counts[-1] + finite)
        while points[start].iteration <= point.iteration - span:
            start += 1
        means.append((sums[-1] - sums[start]) / (counts[-1] - counts[start]) if finite else math.nan)
    return means


def first_at_loss(points: Sequence[LossPoint], loss: float) -> LossPoint | None:
    """Return the first point at or below a loss."""
    return next((point for point in points if point.loss <= loss), None)


def table(runs: Sequence[LossCurves], baseline: LossCurves | None, smooth: int) -> str:
    """Return a table of the last losses, and of the time of each run to the baseline's last validation loss."""
    unit, length = time_unit(max(run.train[-1].hours for run in runs))
    ends = any(run.final for run in runs)
    heads = ["run", "iterations", "training loss", "validation loss", *(["at the end"] if ends else []), unit]
    # During training if the baseline has such losses, else at the end.
    during_training = baseline is not None and bool(baseline.valid)
    compared = {run.name: run.valid if during_training else run.final for run in runs}
    goal = math.nan if baseline is None or not compared[baseline.name] else compared[baseline.name][-1].loss
    if baseline is not None and not math.isnan(goal):
        heads += [f"{goal:.4f} after", unit, f"times {baseline.name}"]
    rows = []
    span = span_of(runs, smooth)
    for run in runs:
        last = run.train[-1]
        cells = [run.name, str(last.iteration), f"{smooth_losses(run.train, span)[-1]:.4f}", _last(run.valid)]
        cells += [*([_last(run.final)] if ends else []), f"{last.hours / length:.3g}"]
        if baseline is not None and not math.isnan(goal):
            point, base_point = (first_at_loss(compared[name], goal) for name in (run.name, baseline.name))
            if point is None or base_point is None:
                cells += ["never", "", ""]
            else:
                times = f"{base_point.hours / point.hours:.2f}" if point.hours else ""
                cells += [str(point.iteration), f"{point.hours / length:.3g}", times]
        rows.append(cells)
    return markdown_table(heads, rows)


def _last(points: Sequence[LossPoint]) -> str:
    return f"{points[-1].loss:.4f}" if points else ""


def notes(runs: Sequence[LossCurves], baseline: LossCurves | None) -> list[str]:
    """Notes on non-finite losses, and on differing samples."""
    lines = []
    for run in runs:
        for kind, points in (("training", run.train), ("validation", [*run.valid, *run.final])):
            gaps = [point.iteration for point in points if math.isnan(point.loss)]
            if gaps:
                lines.append(
                    f"{run.name}: {kind} losses that are not finite: {len(gaps)}, the first at iteration {gaps[0]}"
                )
        if baseline is not None and run.eval_interval and run.eval_interval != baseline.eval_interval != 0:
            lines.append(
                f"{run.name}: validated every {run.eval_interval:g} iterations, {baseline.name} every "
                f"{baseline.eval_interval:g}, so the samples at an iteration differ; compare training losses"
            )
    return lines


Curve = tuple[list[float], list[float]]
"""Coordinates and losses."""


def differences(curve: Curve, baseline: Curve) -> list[tuple[float, float]]:
    """Differences of a curve to a baseline, at the points of the curve that the baseline covers."""
    pairs = []
    for x, y in zip(*curve, strict=True):
        base = interpolate(*baseline, x)
        if base is not None:
            pairs.append((x, y - base))
    return pairs


def curves(run: LossCurves, axis: str, span: float) -> dict[str, Curve]:
    """Training losses, validation losses, and losses at the end, over an axis (time in hours).

    Raises:
        UserError: when a log lacks the coordinates of the axis.
    """
    curves_by_kind = {}
    for kind, points in (("train", run.train), ("valid", run.valid), ("final", run.final)):
        coordinates = [point.at(axis) for point in points]
        if any(x is None for x in coordinates):
            raise UserError(f"{run.name}: the text log lacks tokens; add --seq-length, or leave tokens out of --x")
        losses = smooth_losses(points, span) if kind == "train" else [point.loss for point in points]
        curves_by_kind[kind] = ([x for x in coordinates if x is not None], losses)
    return curves_by_kind


def draw(runs: Sequence[LossCurves], baseline: LossCurves | None, axes: Sequence[str], smooth: int, out: Path) -> None:
    """Draw a column for each axis: losses above, differences to the baseline below.

    Raises:
        UserError: when a log lacks the coordinates of an axis.
    """
    rows = 1 if baseline is None else 2
    unit, length = time_unit(max(run.train[-1].hours for run in runs))
    span = span_of(runs, smooth)
    figure = new_figure(5.2 * len(axes), 3.6 * rows + 0.7)
    panels = figure.subplots(rows, len(axes), squeeze=False, sharex="col")
    for column, axis in enumerate(axes):
        lines = {run.name: curves(run, axis, span) for run in runs}
        scale = length if axis == "hours" else 1.0
        for number, run in enumerate(runs):
            style = _style(number, len(runs))
            _plot(
                panels[0][column],
                {kind: list(zip(*c, strict=True)) for kind, c in lines[run.name].items()},
                style,
                scale,
            )
            if baseline is not None and run is not baseline:
                base_lines = lines[baseline.name]
                changes = {kind: differences(curve, base_lines[kind]) for kind, curve in lines[run.name].items()}
                _plot(panels[1][column], changes, style, scale)
        bottom = panels[-1][column]
        if axis == "iterations":
            label_iterations(bottom)
        else:
            bottom.set_xlabel("tokens" if axis == "tokens" else f"{unit} of training")
    _finish(figure, panels, runs, baseline, span)
    save_figure(figure, out)


def _style(number: int, count: int) -> dict[str, Any]:
    """Return the style of a run's curve; later curves are thinner, so that equal curves stay visible."""
    return {**curve_style(number), "linewidth": 1.2 + 2.2 * (count - 1 - number) / max(count - 1, 3)}


def _plot(panel: Any, points: dict[str, list[tuple[float, float]]], style: dict[str, Any], scale: float) -> None:
    hollow = {"color": style["color"], "marker": style["marker"], "linestyle": "none", "markersize": 4.5}
    for kind, pairs in points.items():
        if not pairs:
            continue
        xs, ys = [x / scale for x, _ in pairs], [y for _, y in pairs]
        if kind == "train":
            panel.plot(xs, ys, color=style["color"], linestyle=style["linestyle"], linewidth=style["linewidth"])
        else:
            panel.plot(xs, ys, **hollow, markerfacecolor="white" if kind == "valid" else style["color"])


def _finish(figure: Any, panels: Any, runs: Sequence[LossCurves], baseline: LossCurves | None, span: float) -> None:
    """Add labels, grids and a common key of colors, lines and markers."""
    from matplotlib.lines import Line2D

    for row, label in zip(
        panels, ("loss, nats per token", f"loss less {baseline.name}'s" if baseline else ""), strict=False
    ):
        row[0].set_ylabel(label)
        for panel in row:
            panel.grid(alpha=0.3)
    if baseline is not None:
        for panel in panels[1]:
            panel.axhline(0.0, color="black", linewidth=0.8)
    mean = "" if span <= max(run.interval for run in runs) else f" (mean of {span:g} iterations)"
    keys = [
        Line2D([], [], **{**_style(n, len(runs)), "markerfacecolor": "white"}, label=run.name)
        for n, run in enumerate(runs)
    ]
    keys.append(Line2D([], [], color="grey", linewidth=1.5, label=f"line: training{mean}"))
    grey: dict[str, Any] = {"color": "grey", "marker": "o", "linestyle": "none"}
    if any(run.valid for run in runs):
        keys.append(Line2D([], [], **grey, markerfacecolor="white", label="hollow: validation"))
    if any(run.final for run in runs):
        keys.append(Line2D([], [], **grey, label="filled: validation at the end, other samples"))
    columns = 1 + 2 * (panels.shape[1] > 1)
    figure.legend(handles=keys, loc="outside upper center", ncols=min(columns, len(keys)), frameon=False, fontsize=8)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]FILE", help="logs")
    parser.add_argument("-o", "--output", help="the picture; .png, .pdf or .svg (loss.png beside the first log)")
    parser.add_argument("--baseline", help="name of the run that the others are compared with")
    parser.add_argument(
        "--x", default="iterations,tokens,hours", help="axes, comma-separated (iterations,tokens,hours)"
    )
    parser.add_argument(
        "--smooth",
        type=int,
        help="training losses to average, of the run that logs least often (10, or a tenth of a short run)",
    )
    parser.add_argument("--seq-length", type=int, help="tokens of a sample, for text logs, which count samples")
    options = parser.parse_args(arguments)
    axes = options.x.split(",")
    try:
        output = Path(options.output or split_name(options.runs[0])[1].parent / "loss.png")
        picture_format(output)
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise UserError(f"--x {unknown[0]}: choose from {', '.join(AXES)}")
        if options.smooth is not None and options.smooth < 1:
            raise UserError(f"--smooth {options.smooth}: must be at least 1")
        runs = [read_run(word, options.seq_length) for word in options.runs]
        names = [run.name for run in runs]
        if len(set(names)) < len(names):
            raise UserError(f"two runs are named {max(names, key=names.count)}; write NAME=FILE")
        if options.baseline is not None and options.baseline not in names:
            raise UserError(f"--baseline {options.baseline}: the runs are {', '.join(names)}")
        baseline = next((run for run in runs if run.name == options.baseline), None)
        smooth = options.smooth or default_smooth(runs)
        draw(runs, baseline, axes, smooth, output)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([table(runs, baseline, smooth), "", *notes(runs, baseline), str(output)]))
    return 0
