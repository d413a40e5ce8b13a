#!/usr/bin/env python3
"""Draws how long the largest gradients stay where they are, from a run with --log-gradients.

    python tools/launch.py ... pretrain_gpt.py ... --log-gradients \\
        --log-gradients-interval 100 --log-json-file log.jsonl
    python tools/plot_grad_distribution.py log.jsonl -o gradients.png
    python tools/launch.py ... pretrain_gpt.py ... --log-gradients --log-gradients-bins 200 \\
        --log-json-file log.jsonl
    python tools/plot_grad_distribution.py log.jsonl --places places.png --only layers.2.mlp

Left: the share of the largest gradients of a matrix (--log-gradients-density of it) that was among the largest at the
record before, by kind of matrix, with the range over layers; a choice at random would keep the density. Right: their
share of the gradient's squared norm. A Top-K compressor with a lasting choice (Radius) rests on the first being high,
and any Top-K on the second. Prints the means as a table. Figures that are not finite (of gradients that overflowed) are
gaps, and are counted below the table.

--places draws Radius's heat map, of runs with --log-gradients-bins: over iterations, how many of the largest gradients
are in each part of a matrix (first dimension from bottom to top), as a multiple of what a choice at random would have
there. Lines that go on from left to right are places that stay among the largest. One matrix of each kind is drawn,
of the middle layer, or those whose names hold a word of --only.
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
"""By kind of matrix and iteration, the figures of the layers; nan for what was not finite."""


def kind_of(name: str) -> str:
    """A parameter's name without its layer's number."""
    return re.sub(r"\blayers\.\d+\.", "", name).removesuffix(".weight")


def read_events(path: Path) -> list[Record]:
    """The records of gradients.

    Raises:
        UserError: when the file cannot be read or holds none.
    """
    try:
        events = [event for event in read_records(path) if event.get("kind") == "gradients"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not events:
        raise UserError(f"{path}: no records of gradients; run with --log-gradients and --log-json-file")
    return events


def read_series(events: Sequence[Record]) -> tuple[float, dict[str, Series]]:
    """The density, and the series of ``kept`` and ``energy``.

    Raises:
        UserError: for a record that is not as the run writes it.
    """
    found: dict[str, Series] = {"kept": {}, "energy": {}}
    for event in events:
        iteration = event.iteration()
        for name, figures in event.groups("parameters").items():
            for figure in figures:
                if figure == "places":
                    continue
                if figure not in found:
                    raise UserError(f"{figures.location}: {figure} is none of {', '.join(found)}; delete the line")
                kind = found[figure].setdefault(kind_of(name), {})
                kind.setdefault(iteration, []).append(figures.number(figure))
    return events[-1].number("density"), found


def lost(found: dict[str, Series]) -> list[str]:
    """A line about the figures that are not finite, if there are any."""
    iterations = [
        iteration
        for series in found.values()
        for points in series.values()
        for iteration, values in points.items()
        for value in values
        if math.isnan(value)
    ]
    if not iterations:
        return []
    return [f"figures that are not finite: {len(iterations)}, the first at iteration {min(iterations)}"]


def table(found: dict[str, Series]) -> str:
    """Means over layers and records, and over the last quarter of the records."""
    lines = []
    for kind in sorted(found["energy"]):
        cells = [kind]
        for figure in ("kept", "energy"):
            rows = [values for _, values in sorted(found[figure].get(kind, {}).items())]
            last = rows[-max(len(rows) // 4, 1) :]
            cells += [
                f"{statistics.fmean(finite_figures(x for row in part for x in row)):.3f}" if part else ""
                for part in (rows, last)
            ]
        lines.append(cells)
    return markdown_table(("matrix", "kept", "kept, last quarter", "energy", "energy, last quarter"), lines)


def draw(found: dict[str, Series], density: float, out: Path) -> None:
    """Both panels."""
    figure = new_figure(11.0, 4.4)
    left, right = figure.subplots(1, 2)
    _panel(left, found["kept"], "share kept since the record before")
    left.axhline(density, color="black", linewidth=0.8, linestyle="--", label="at random")
    _panel(right, found["energy"], "share of the squared norm")
    left.legend(frameon=False, fontsize=7)
    figure.suptitle(f"the largest {density:.3g} of each matrix's gradients")
    save_figure(figure, out)


def _panel(axes: Any, series: Series, label: str) -> None:
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
"""By parameter, the iterations and the counts in its parts at each."""


def read_places(events: Sequence[Record], only: str | None) -> Places:
    """The counts of one matrix of each kind, of the middle layer, or of those whose names hold a word of ``only``.

    Raises:
        UserError: when there are none.
    """
    found: Places = {}
    for event in events:
        iteration = event.iteration()
        for name, figures in event.groups("parameters").items():
            if "places" in figures:
                iterations, counts = found.setdefault(name, ([], []))
                iterations.append(iteration)
                counts.append(figures.numbers("places"))
                if len(counts[-1]) != len(counts[0]) or not counts[0] or any(map(math.isnan, counts[-1])):
                    raise UserError(
                        f"{figures.location}: places: {len(counts[-1])} counts, where as many whole numbers are wanted "
                        f"as before ({len(counts[0])}); give the log of one run"
                    )
    if not found:
        raise UserError("--places: no places in the log; run with --log-gradients-bins 200")
    if only is not None:
        words = only.split(",")
        chosen = {name: each for name, each in found.items() if any(word in name for word in words)}
        if not chosen:
            raise UserError(f"--only {only}: no matrix is named so; there are {', '.join(sorted(found))}")
        return chosen
    kinds: dict[str, list[str]] = {}
    for name in sorted(found, key=_layer):
        kinds.setdefault(kind_of(name), []).append(name)
    middle = [names[len(names) // 2] for names in kinds.values()]
    return {name: found[name] for name in middle}


def _layer(name: str) -> int:
    match = re.search(r"\blayers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def draw_places(found: Places, density: float, out: Path) -> None:
    """A heat map for each matrix, all of the same colors."""
    from matplotlib.colors import LogNorm

    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    figure = new_figure(4.2 * columns + 0.6, 3.0 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    # A part without any would be minus infinity: it has the color of the least.
    norm, shown = LogNorm(0.25, max(1 / density, 2.0) if density else 2.0, clip=True), None
    for panel, (name, (iterations, counts)) in zip(panels.flat, sorted(found.items()), strict=False):
        shares = [[count * len(row) / max(sum(row), 1) for count in row] for row in counts]
        edges = _edges(iterations)
        parts = [i / len(shares[0]) for i in range(len(shares[0]) + 1)]
        columns_first = list(zip(*shares, strict=True))
        shown = panel.pcolormesh(edges, parts, columns_first, norm=norm, cmap="viridis", rasterized=True)
        panel.set_title(name.removesuffix(".weight"), fontsize=9)
        label_iterations(panel)
    for panel in panels.flat[len(found) :]:
        panel.remove()
    for row in panels:
        row[0].set_ylabel("place in the matrix")
    figure.colorbar(
        shown, ax=panels, aspect=40, pad=0.01, label=f"times as many of the largest {density:.3g} as at random"
    )
    save_figure(figure, out)


def _edges(places: Sequence[int]) -> list[float]:
    """Between records, and as far outside the first and the last."""
    if len(places) == 1:
        return [places[0] - 0.5, places[0] + 0.5]
    between = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    return [2 * places[0] - between[0], *between, 2 * places[-1] - between[-1]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", help="the file of --log-json-file")
    parser.add_argument(
        "-o", "--output", default="gradients.png", help="the picture; .png, .pdf or .svg (gradients.png)"
    )
    parser.add_argument("--places", metavar="FILE", help="also draw this heat map of where the largest are")
    parser.add_argument("--only", metavar="WORDS", help="comma-separated: matrices in the heat map, by parts of names")
    options = parser.parse_args(arguments)
    try:
        for picture in filter(None, (options.output, options.places)):
            picture_format(Path(picture))
        if options.only is not None and options.places is None:
            raise UserError(f"--only {options.only} chooses what --places draws; give --places FILE")
        events = read_events(Path(options.log))
        density, found = read_series(events)
        places = None if options.places is None else read_places(events, options.only)
        draw(found, density, Path(options.output))
        if places is not None:
            draw_places(places, density, Path(options.places))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([table(found), "", *lost(found), *filter(None, (options.output, options.places))]))
    return 0
