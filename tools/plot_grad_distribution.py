#!/usr/bin/env python3
"""Plot how persistent the largest gradients are, from the log of a run with --log-gradients.

    python tools/launch.py ... pretrain_gpt.py ... --log-gradients \\
        --log-gradients-interval 100 --log-json-file log.jsonl
    python tools/plot_grad_distribution.py log.jsonl -o gradients.png
    python tools/launch.py ... pretrain_gpt.py ... --log-gradients --log-gradients-bins 200 \\
        --log-json-file log.jsonl
    python tools/plot_grad_distribution.py log.jsonl --places places.png --only layers.2.mlp

Left: of a matrix's largest gradients (a share --log-gradients-density of its entries), the share that was already among
the largest at the previous record, by kind of matrix, with the range over layers; a random selection would keep the
density. Right: the share of the gradient's squared norm in the largest gradients. A Top-K compressor that keeps its
selection for many steps (Radius) needs the first to be high, and any Top-K the second. The means are printed as a
table. Values that are not finite (of gradients that overflowed) are gaps, and are counted below the table.

--places draws Radius's heat map for runs with --log-gradients-bins: over iterations, how many of the largest gradients
are in each part of a matrix (first dimension from bottom to top), as a multiple of the number in a random selection.
Horizontal lines are places that stay among the largest. The map shows one matrix of each kind, from the middle layer,
or all those with a word of --only in their names.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.plot_grad_distribution")

from megatron.base.errors import UserError
from megatron.base.figures import COLORS, label_iterations, new_figure, picture_format, save_figure
from megatron.base.markdown import markdown_table
from megatron.training.records import Record, finite_figures, read_records

Series = dict[str, dict[int, list[float]]]
"""Kind of matrix -> iteration -> values of the layers; nan for values that were not finite."""


def kind_of(name: str) -> str:
    """Remove the layer number from a parameter's name."""
    return re.sub(r"\blayers\.\d+\.", "", name).removesuffix(".weight")


def read_events(path: Path) -> list[Record]:
    """Read a log's records of gradients.

    Raises:
        UserError: if the file cannot be read or has none.
    """
    try:
        events = [event for event in read_records(path) if event.get("kind") == "gradients"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not events:
        raise UserError(f"{path}: no records of gradients; run with --log-gradients and --log-json-file")
    return events


def read_series(events: Sequence[Record]) -> tuple[float, dict[str, Series]]:
    """Return the density, and the series of ``kept`` and ``energy``.

    Raises:
        UserError: for a malformed record.
    """
    series: dict[str, Series] = {"kept": {}, "energy": {}}
    for event in events:
        iteration = event.iteration()
        for name, figures in event.groups("parameters").items():
            for figure in figures:
                if figure == "places":
                    continue
                if figure not in series:
                    raise UserError(f"{figures.location}: {figure} is not one of {', '.join(series)}; delete the line")
                points = series[figure].setdefault(kind_of(name), {})
                points.setdefault(iteration, []).append(figures.number(figure))
    return events[-1].number("density"), series


def count_gaps(series: dict[str, Series]) -> list[str]:
    """Return a line about the values that are not finite, if there are any."""
    iterations = [
        iteration
        for kinds in series.values()
        for points in kinds.values()
        for iteration, values in points.items()
        for value in values
        if math.isnan(value)
    ]
    if not iterations:
        return []
    return [f"values that are not finite: {len(iterations)}, the first at iteration {min(iterations)}"]


def format_means(series: dict[str, Series]) -> str:
    """Format the means over layers and records, and over the last quarter of the records."""
    lines = []
    for kind in sorted(series["energy"]):
        cells = [kind]
        for figure in ("kept", "energy"):
            rows = [values for _, values in sorted(series[figure].get(kind, {}).items())]
            last = rows[-max(len(rows) // 4, 1) :]
            cells += [
                f"{statistics.fmean(finite_figures(x for row in part for x in row)):.3f}" if part else ""
                for part in (rows, last)
            ]
        lines.append(cells)
    return markdown_table(("matrix", "kept", "kept, last quarter", "energy", "energy, last quarter"), lines)


def draw_series(series: dict[str, Series], density: float, out: Path) -> None:
    """Draw both panels."""
    figure = new_figure(11.0, 4.4)
    left, right = figure.subplots(1, 2)
    _draw_panel(left, series["kept"], "share kept since the previous record")
    left.axhline(density, color="black", linewidth=0.8, linestyle="--", label="at random")
    _draw_panel(right, series["energy"], "share of the squared norm")
    left.legend(frameon=False, fontsize=7)
    figure.suptitle(f"the largest {density:.3g} of each matrix's gradients")
    save_figure(figure, out)


def _draw_panel(axes: Any, series: Series, label: str) -> None:
    for number, (kind, points) in enumerate(sorted(series.items())):
        iterations = sorted(points)
        layers = [finite_figures(points[iteration]) for iteration in iterations]
        color, dashes = COLORS[number % len(COLORS)], "-" if number < len(COLORS) else "--"
        means = [statistics.fmean(values) for values in layers]
        axes.plot(iterations, means, dashes, color=color, label=kind)
        axes.fill_between(iterations, list(map(min, layers)), list(map(max, layers)), color=color, alpha=0.15)
    label_iterations(axes)
    axes.set(ylabel=label, ylim=(0, 1))
    axes.grid(alpha=0.3)


Places = dict[str, tuple[list[int], list[list[float]]]]
"""Parameter -> iterations, and the counts in its parts at each."""


def read_places(events: Sequence[Record], only: str | None) -> Places:
    """Read the counts of one matrix of each kind, from the middle layer, or of those named by a word of ``only``.

    Raises:
        UserError: if there are none.
    """
    places: Places = {}
    for event in events:
        iteration = event.iteration()
        for name, figures in event.groups("parameters").items():
            if "places" in figures:
                iterations, counts = places.setdefault(name, ([], []))
                iterations.append(iteration)
                counts.append(figures.numbers("places"))
                if len(counts[-1]) != len(counts[0]) or not counts[0] or any(map(math.isnan, counts[-1])):
                    raise UserError(
                        f"{figures.location}: places: {len(counts[-1])} counts, but the first record has "
                        f"{len(counts[0])} whole numbers; give the log of one run"
                    )
    if not places:
        raise UserError("--places: no places in the log; run with --log-gradients-bins 200")
    if only is not None:
        words = only.split(",")
        chosen = {name: each for name, each in places.items() if any(word in name for word in words)}
        if not chosen:
            raise UserError(f"--only {only}: no matrix has such a name; the log has {', '.join(sorted(places))}")
        return chosen
    kinds: dict[str, list[str]] = {}
    for name in sorted(places, key=_layer):
        kinds.setdefault(kind_of(name), []).append(name)
    middle = [names[len(names) // 2] for names in kinds.values()]
    return {name: places[name] for name in middle}


def _layer(name: str) -> int:
    match = re.search(r"\blayers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def draw_places(places: Places, density: float, out: Path) -> None:
    """Draw a heat map for each matrix, with the same color scale for all."""
    from matplotlib.colors import LogNorm

    columns = min(len(places), 3)
    rows = -(-len(places) // columns)
    figure = new_figure(4.2 * columns + 0.6, 3.0 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    # The logarithm of a part with none is minus infinity: clipping gives it the lowest color.
    norm, mesh = LogNorm(0.25, max(1 / density, 2.0) if density else 2.0, clip=True), None
    for panel, (name, (iterations, counts)) in zip(panels.flat, sorted(places.items()), strict=False):
        shares = [[count * len(row) / max(sum(row), 1) for count in row] for row in counts]
        edges = _edges(iterations)
        parts = [i / len(shares[0]) for i in range(len(shares[0]) + 1)]
        columns_first = list(zip(*shares, strict=True))
        mesh = panel.pcolormesh(edges, parts, columns_first, norm=norm, cmap="viridis", rasterized=True)
        panel.set_title(name.removesuffix(".weight"), fontsize=9)
        label_iterations(panel)
    for panel in panels.flat[len(places) :]:
        panel.remove()
    for row in panels:
        row[0].set_ylabel("place in the matrix")
    figure.colorbar(
        mesh, ax=panels, aspect=40, pad=0.01, label=f"times as many of the largest {density:.3g} as at random"
    )
    save_figure(figure, out)


def _edges(iterations: Sequence[int]) -> list[float]:
    """Return the midpoints between records, and one edge on each side, as far out as the nearest midpoint is in."""
    if len(iterations) == 1:
        return [iterations[0] - 0.5, iterations[0] + 0.5]
    between = [(a + b) / 2 for a, b in itertools.pairwise(iterations)]
    return [2 * iterations[0] - between[0], *between, 2 * iterations[-1] - between[-1]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", help="log written by --log-json-file")
    parser.add_argument("-o", "--output", default="gradients.png", help="picture; .png, .pdf or .svg (gradients.png)")
    parser.add_argument("--places", metavar="FILE", help="also draw a heat map of where the largest gradients are")
    parser.add_argument("--only", metavar="WORDS", help="matrices in the heat map: parts of names, comma-separated")
    options = parser.parse_args(arguments)
    try:
        for picture in filter(None, (options.output, options.places)):
            picture_format(Path(picture))
        if options.only is not None and options.places is None:
            raise UserError(f"--only {options.only} selects matrices for --places; give --places FILE")
        events = read_events(Path(options.log))
        density, series = read_series(events)
        places = None if options.places is None else read_places(events, options.only)
        draw_series(series, density, Path(options.output))
        if places is not None:
            draw_places(places, density, Path(options.places))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([format_means(series), "", *count_gaps(series), *filter(None, (options.output, options.places))]))
    return 0
