"""Pictures of what compression costs in loss and saves in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.plots import COLORS, curve_style, label_iterations, new_figure, save_figure


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Args:
        case: name of the case.
        loss, spread: final validation losses, mean and standard deviation over the seeds.
        worse: percent above the dense runs of the same seeds; None where those are missing.
        sent: kB per iteration, by point.
        seeds: number of runs.
        words: the case's specs and flags.
        exact, ranked: percent of held-out continuations that greedy decoding found, and of those that were likelier
            than the wrong ones, means over the runs; None where they were not measured.
    """

    case: str
    loss: float
    spread: float
    worse: float | None
    sent: Mapping[str, float]
    seeds: int = 1
    exact: float | None = None
    ranked: float | None = None
    words: str = ""


def draw_outcomes(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draws a line for each case: its loss above dense, and the bytes that it sends."""
    figure = new_figure(9.5, 0.27 * len(outcomes) + 1.2)
    loss, traffic = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1.0))
    # Percents from a hundredth to ten: a logarithmic axis, on which what is not above dense is at the edge.
    least = 0.03
    for y, outcome in enumerate(outcomes):
        if outcome.case.split(", ")[-1] == "dense":
            loss.annotate(
                f"{outcome.loss:.3f} nats per token", (least, y), (4, -2.5), textcoords="offset points", fontsize=7
            )
            continue
        if outcome.worse is None or math.isnan(outcome.worse):
            continue
        x = max(outcome.worse, least)
        loss.plot([least, x], [y, y], color=COLORS[0], linewidth=1.0, alpha=0.4)
        loss.plot([x], [y], "o", color=COLORS[0], markersize=5)
        loss.annotate(f"{outcome.worse:+.2f}%", (x, y), (7, -2.5), textcoords="offset points", fontsize=7)
    known = [outcome.worse for outcome in outcomes if outcome.worse is not None and not math.isnan(outcome.worse)]
    loss.set(xscale="log", xlim=(least, max([*known, 1.0]) * 3.5))
    loss.set_xlabel("validation loss above dense, % (mean over the seeds)", fontsize=8)
    loss.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    points = list(dict.fromkeys(point for one in outcomes for point, sent in one.sent.items() if sent))
    starts = [0.0] * len(outcomes)
    for number, point in enumerate(points):
        widths = [outcome.sent.get(point, 0.0) / 1000 for outcome in outcomes]
        traffic.barh(
            range(len(outcomes)), widths, left=starts, height=0.7, color=COLORS[number % len(COLORS)], label=point
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    traffic.set_xlabel("MB sent in an iteration, all ranks", fontsize=8)
    figure.legend(*traffic.get_legend_handles_labels(), loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    traffic.set_ylim(len(outcomes) - 0.4, -0.6)
    loss.set_yticks(range(len(outcomes)), [outcome.case for outcome in outcomes], fontsize=8)
    for panel in (loss, traffic):
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
        panel.tick_params(axis="x", labelsize=8)
        panel.tick_params(axis="y", length=0)
    save_figure(figure, path)


Means = Mapping[str, Mapping[int, float]]
"""Mean validation losses over the seeds, by case and iteration."""


def family_of(case: str) -> str:
    """The panel of a case."""
    if case.startswith("experts"):
        return "experts"
    if "+" in case:
        return "several points at once"
    return next((name for name in ("CB", "Radius", "PowerSGD") if case.startswith(name)), "fixed point and differences")


def draw_curves(means: Means, path: Path) -> None:
    """Draws the loss above the dense runs over iterations, a panel for each family of cases.

    Where there is no dense run, the losses themselves.
    """
    families: dict[str, list[str]] = {}
    for case in means:
        if case.split(", ")[-1] != "dense":
            families.setdefault(family_of(case), []).append(case)
    families = families or {"": list(means)}
    columns = min(len(families), 2)
    rows = -(-len(families) // columns)
    figure = new_figure(5.2 * columns, 3.6 * rows)
    # One axis, so that a case of one's own in another panel than the built-in ones is seen beside them.
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for panel in panels.flat:
        panel.yaxis.set_tick_params(labelleft=True)
    for panel, (family, cases) in zip(panels.flat, families.items(), strict=False):
        # Those of experts have a model of their own.
        dense = means.get("experts, dense" if family == "experts" else "dense", {}) if family else {}
        for number, case in enumerate(cases):
            _curve(panel, means[case], dense, curve_style(number), case)
        if dense:
            panel.axhline(0.0, color="black", linewidth=0.8)
        label_iterations(panel)
        panel.set_ylabel("loss above dense, nats per token" if dense else "validation loss, nats per token")
        panel.set_title(family, fontsize=10)
        if cases:
            panel.legend(fontsize=7, frameon=False)
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(families) :]:
        panel.remove()
    save_figure(figure, path)


def _curve(
    panel: Any, means: Mapping[int, float], dense: Mapping[int, float], style: dict[str, Any], name: str
) -> None:
    """Draws a curve at the iterations that both runs have."""
    places = sorted(means.keys() & dense.keys() if dense else means.keys())
    losses = [means[place] - dense.get(place, 0.0) for place in places]
    panel.plot(places, losses, **style, markersize=4, linewidth=1.2, label=name)
