#!/usr/bin/env python3
"""Draws how long the largest gradients stay where they are, from a run with --log-gradients.

    torchrun ... pretrain_gpt.py ... --log-gradients --log-gradients-interval 100 --log-json-file log.jsonl
    python tools/plot_grad_distribution.py log.jsonl -o gradients.png

Left: the share of the largest gradients of a matrix (--log-gradients-density of it) that was among the largest at the
record before, by kind of matrix, with the range over layers; a choice at random would keep the density. Right: their
share of the gradient's squared norm. A Top-K compressor with a lasting choice (Radius) rests on the first being high,
and any Top-K on the second. Prints the means as a table. Figures that are not finite (of gradients that overflowed) are
gaps, and are counted below the table.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(REPO))

from megatron.config.errors import UserError  # noqa: E402
from megatron.training.plots import new_figure, picture_format, save_figure  # noqa: E402
from megatron.training.sinks import finite_figures, read_records  # noqa: E402

Series = dict[str, dict[int, list[float]]]
"""By kind of matrix and iteration, the figures of the layers; nan for what was not finite."""


def kind_of(name: str) -> str:
    """A parameter's name without its layer's number."""
    return re.sub(r"\blayers\.\d+\.", "", name).removesuffix(".weight")


def read_series(path: Path) -> tuple[float, dict[str, Series]]:
    """The density, and the series of ``kept`` and ``energy``.

    Raises:
        UserError: when the file cannot be read, holds no records, or one that is not as the run writes it.
    """
    try:
        events = [event for event in read_records(path) if event.get("kind") == "gradients"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not events:
        raise UserError(f"{path}: no records of gradients; run with --log-gradients and --log-json-file")
    found: dict[str, Series] = {"kept": {}, "energy": {}}
    for event in events:
        iteration = event.iteration()
        for name, figures in event.groups("parameters").items():
            for figure in figures:
                if figure not in found:
                    raise UserError(f"{figures.place}: {figure} is none of {', '.join(found)}; delete the line")
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
    lines = ["| matrix | kept | kept, last quarter | energy | energy, last quarter |", "|---|---|---|---|---|"]
    for kind in sorted(found["energy"]):
        cells = [kind]
        for figure in ("kept", "energy"):
            rows = [values for _, values in sorted(found[figure].get(kind, {}).items())]
            last = rows[-max(len(rows) // 4, 1) :]
            cells += [
                f"{statistics.fmean(finite_figures(x for row in part for x in row)):.3f}" if part else ""
                for part in (rows, last)
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
        color = f"C{number}"
        axes.plot(iterations, [statistics.fmean(values) for values in layers], color=color, label=kind)
        axes.fill_between(iterations, list(map(min, layers)), list(map(max, layers)), color=color, alpha=0.15)
    axes.set(xlabel="iteration", ylabel=label, ylim=(0, 1))
    axes.grid(alpha=0.3)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", help="the file of --log-json-file")
    parser.add_argument(
        "-o", "--output", default="gradients.png", help="the picture; .png, .pdf or .svg (gradients.png)"
    )
    options = parser.parse_args(arguments)
    try:
        picture_format(Path(options.output))
        density, found = read_series(Path(options.log))
        draw(found, density, Path(options.output))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join([table(found), "", *lost(found), options.output]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
