#!/usr/bin/env python3
"""Draws the diagrams of the documentation: communication points, pipeline schedules, experts and islands.

    python tools/draw_diagrams.py                     docs/images
    python tools/draw_diagrams.py --out /tmp/images

The schedules are those of training, simulated as by the planner.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.draw_diagrams")

from megatron.base.figures import COLORS, new_figure, save_figure
from megatron.compression.points import Point
from megatron.parallel.pipeline.schedule import TimedPass, find_epilogue
from megatron.parallel.pipeline.schedule_plot import (
    Timeline,
    compute_bubble,
    draw_passes,
    draw_schedule,
    find_span,
    make_legend_patches,
    summarize_times,
)
from megatron.parallel.pipeline.simulate import Hop, Pipeline

REPO = Path(__file__).resolve().parents[1]

STAGES, MICRO_BATCHES = 4, 8

COLOR = {
    Point.PP_FWD: COLORS[0],
    Point.PP_BWD: COLORS[1],
    Point.TP_FWD: COLORS[2],
    Point.TP_BWD: COLORS[2],
    Point.DP_GRAD: COLORS[3],
    Point.PARAM_GATHER: COLORS[3],
    Point.EMBED_GRAD: COLORS[4],
    Point.EP_DISPATCH_FWD: COLORS[0],
    Point.EP_DISPATCH_BWD: COLORS[1],
    Point.EP_COMBINE_FWD: COLORS[2],
    Point.EP_COMBINE_BWD: COLORS[3],
    Point.OUTER: COLORS[4],
}


def _simulate_passes(kind: str, micro_batches: int, flush: bool = True) -> list[Sequence[TimedPass]]:
    """Simulate a schedule whose messages take no time: forwards of 1 ms, backwards of 2 ms, half of it for weights."""
    forward_s, backward_s, weight_s = ([seconds] * STAGES for seconds in (1e-3, 2e-3, 1e-3))
    pipeline = Pipeline(kind, forward_s, backward_s, weight_s, STAGES, lambda *_: Hop())
    return [rank.passes for rank in pipeline.simulate_in_full(micro_batches, flush)]


def _make_timeline(title: str, rows: Sequence[Sequence[TimedPass]]) -> Timeline:
    start_s, end_s = find_span(rows)
    title = f"{title}: {summarize_times(end_s - start_s, compute_bubble(rows))}"
    return Timeline(title, rows, [f"stage {stage}" for stage in range(STAGES)])


def _simulate(kind: str) -> Timeline:
    """Simulate a step."""
    return _make_timeline(kind, _simulate_passes(kind, MICRO_BATCHES))


def draw_bubbles() -> Any:
    """Draw 1F1B above the zero bubble schedule that fills its gaps with weight passes."""
    return draw_schedule([_simulate("1f1b"), _simulate("zb-h1")])


def draw_no_flush() -> Any:
    """Draw two steps of 1F1B with and without a flush between them."""
    count = MICRO_BATCHES // 2
    first = _simulate_passes("1f1b", count)
    _, end_s = find_span(first)
    flushed = [[*row, *(_shift(timed, count, end_s) for timed in row)] for row in first]
    two_steps = _simulate_passes("1f1b", 2 * count, flush=False)
    return draw_schedule(
        [
            _make_timeline(f"two steps of {count} micro-batches", flushed),
            _make_timeline("the same, --delay 1 --no-pipeline-flush", two_steps),
        ]
    )


def _shift(timed: TimedPass, micro_batches: int, seconds: float) -> TimedPass:
    """Shift a pass to the next step."""
    op = replace(timed.op, micro_batch=timed.op.micro_batch + micro_batches)
    return TimedPass(op, timed.start_s + seconds, timed.end_s + seconds)


def draw_epilogue() -> Any:
    """Draw 1F1B with marks on the backward passes of the epilogue."""
    from matplotlib.patches import Patch

    figure = new_figure(10, 3.1)
    axes = figure.add_subplot()
    timeline = _simulate("1f1b")
    _, end_s = find_span(timeline.rows)
    draw_passes(axes, timeline, 9 / (1000 * end_s))
    style: dict[str, Any] = {"facecolor": COLORS[1], "edgecolor": "white", "hatch": "////", "linewidth": 0.0}
    for stage, row in list(enumerate(timeline.rows))[1:]:
        late = find_epilogue([timed.op for timed in row])
        spans = [(1000 * timed.start_s, 1000 * timed.seconds) for timed in row if timed.op in late]
        axes.broken_barh(spans, (stage + 0.2, 0.22), **style)
    axes.set_xlim(0, 1000 * end_s)
    axes.set_xticks([])
    axes.set_xlabel("time")
    label = "in the epilogue: no forward is left to overlap with the message (when=epilogue)"
    patches = [
        *make_legend_patches([timed for row in timeline.rows for timed in row]),
        Patch(label=label, **style),
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _box(axes: Any, x: float, y: float, title: str, text: str) -> None:
    axes.add_patch(_rectangle(x, y, 2.3, 1.15))
    axes.text(x + 1.15, y + 0.78, title, ha="center", va="center", fontsize=9.5, weight="bold")
    axes.text(x + 1.15, y + 0.36, text, ha="center", va="center", fontsize=9, color="#333333")


def _rectangle(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", facecolor="#F4F6F8",
                          edgecolor="#888888", linewidth=1.0)  # fmt: skip


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], point: Point, both: bool = False) -> None:
    style = {"arrowstyle": "<->" if both else "->", "color": COLOR[point], "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def _label(axes: Any, x: float, y: float, points: Sequence[Point], ha: str = "center", more: str = "") -> None:
    text = "\n".join(point.value for point in points) + more
    axes.text(x, y, text, ha=ha, va="center", fontsize=9.5, color=COLOR[points[0]], weight="bold", linespacing=1.3)


def _bracket(axes: Any, side: float, edge: float, levels: tuple[float, float], point: Point) -> None:
    """Connect two boxes around the outside, at x ``side``, from their edges."""
    high, low = levels
    axes.plot([edge, side, side, edge], [high, high, low, low], color=COLOR[point], linewidth=2.2)
    for level in levels:
        _arrow(axes, (side, level), (edge, level), point)


def draw_points() -> Any:
    """Draw two replicas of two pipeline stages of two tensor-parallel ranks, with the points of their messages."""
    figure = new_figure(10, 5.6)
    axes = figure.subplots()
    axes.set_xlim(-0.3, 12.5)
    axes.set_ylim(-0.75, 6.9)
    axes.axis("off")
    columns, rows = (2.4, 7.5), (3.55, 0.0)
    levels = {(replica, tensor): y + 1.5 * (1 - tensor) for replica, y in enumerate(rows) for tensor in (0, 1)}
    for replica, y in enumerate(rows):
        for x, content in zip(columns, ("embedding, first layers", "last layers, loss"), strict=True):
            for tensor in (0, 1):
                _box(axes, x, levels[replica, tensor], f"tensor-parallel rank {tensor}", content)
            left = x == columns[0]
            at = x + (0.3 if left else 2.0)
            _arrow(axes, (at, y + 1.15), (at, y + 1.5), Point.TP_FWD, both=True)
            axes.text(at + (0.15 if left else -0.15), y + 1.32, f"{Point.TP_FWD.value}, {Point.TP_BWD.value}",
                      ha="left" if left else "right", va="center", fontsize=9.5, color=COLOR[Point.TP_FWD],
                      weight="bold")  # fmt: skip
        for tensor in (0, 1):
            level = levels[replica, tensor]
            _arrow(axes, (columns[0] + 2.3, level + 0.75), (columns[1], level + 0.75), Point.PP_FWD)
            _arrow(axes, (columns[1], level + 0.4), (columns[0] + 2.3, level + 0.4), Point.PP_BWD)
        center = (columns[0] + 2.3 + columns[1]) / 2
        _label(axes, center, levels[replica, 0] + 0.97, [Point.PP_FWD])
        _label(axes, center, levels[replica, 0] + 0.18, [Point.PP_BWD])
        top = y + 2.82
        for x in columns:
            axes.plot([x + 1.15, x + 1.15], [y + 2.65, top], color=COLOR[Point.EMBED_GRAD], linewidth=2.2)
        _arrow(axes, (columns[0] + 1.15, top), (columns[1] + 1.15, top), Point.EMBED_GRAD, both=True)
        _label(axes, center, top + 0.2, [Point.EMBED_GRAD], more=" (first and last stage, when tied)")
        axes.text(-0.15, y + 1.32, f"replica {replica}", rotation=90, ha="center", va="center", fontsize=11)
    for tensor in (0, 1):
        pair = (levels[0, tensor] + 0.57, levels[1, tensor] + 0.57)
        _bracket(axes, columns[0] - 0.3 - 0.3 * tensor, columns[0], pair, Point.DP_GRAD)
        _bracket(axes, columns[1] + 2.6 + 0.3 * tensor, columns[1] + 2.3, pair, Point.DP_GRAD)
    _label(axes, columns[0] - 0.72, 3.1, [Point.DP_GRAD, Point.PARAM_GATHER], ha="right")
    _label(axes, columns[1] + 3.02, 3.1, [Point.DP_GRAD, Point.PARAM_GATHER], ha="left")
    for x, name in zip(columns, ("pipeline stage 0", "pipeline stage 1"), strict=True):
        axes.text(x + 1.15, -0.5, name, ha="center", fontsize=11)
    return figure


def draw_experts() -> Any:
    """Draw the messages of two ranks that share a layer's experts: rows of tokens, and their gradients."""
    figure = new_figure(9.5, 3.6)
    axes = figure.subplots()
    axes.set_xlim(-0.4, 12.0)
    axes.set_ylim(-0.2, 4.9)
    axes.axis("off")
    columns = (0.2, 4.65, 9.1)
    titles = ("router", "experts", "weighted sum")
    for rank, y in enumerate((3.3, 0.2)):
        own = f"{2 * rank}, {2 * rank + 1}"
        texts = (f"of the tokens of rank {rank}", f"{own} of 0 to 3", "of each token's experts")
        for x, title, text in zip(columns, titles, texts, strict=True):
            _box(axes, x, y, title, text)
        axes.text(-0.2, y + 0.57, f"rank {rank}", rotation=90, ha="center", va="center", fontsize=11)
    pairs = (
        (columns[0], columns[1], Point.EP_DISPATCH_FWD, Point.EP_DISPATCH_BWD),
        (columns[1], columns[2], Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD),
    )
    for left, right, forward, backward in pairs:
        for start, end in ((3.3, 0.2), (0.2, 3.3)):
            _arrow(axes, (left + 2.3, start + 0.8), (right, end + 0.8), forward)
            _arrow(axes, (right, end + 0.35), (left + 2.3, start + 0.35), backward)
        center = (left + 2.3 + right) / 2
        _label(axes, center, 4.7, [forward])
        _label(axes, center, -0.05, [backward])
    return figure


def draw_islands() -> Any:
    """Draw two islands that first train in step, and then exchange their progress after some steps."""
    figure = new_figure(9.5, 3.0)
    axes = figure.subplots()
    axes.set_xlim(-1.0, 12.6)
    axes.set_ylim(-0.7, 3.9)
    axes.axis("off")
    in_step, every, rounds, width = 3, 4, 2, 1.05
    for island, y in enumerate((2.1, 0.2)):
        axes.text(-0.2, y + 0.4, f"island {island}", ha="right", va="center", fontsize=11)
        for step in range(in_step + every * rounds):
            axes.add_patch(_rectangle(step * width, y, width - 0.25, 0.8))
            axes.text(step * width + (width - 0.25) / 2, y + 0.4, "step", ha="center", va="center", fontsize=9.5)
    for step in range(in_step + every * rounds):
        at = (step + 1) * width - 0.125
        local = step - in_step + 1
        if local <= 0 or local % every == 0:
            axes.plot([at, at], [0.6, 2.5], color=COLOR[Point.OUTER], linewidth=1.0 if local <= 0 else 3.4)
    _label(axes, in_step * width / 2, 3.45, [Point.OUTER], more=": gradients")
    _label(axes, (in_step + every) * width, 3.45, [Point.OUTER], more=": compressed differences from the anchor")
    axes.text(in_step * width / 2, -0.35, "in step (warmup)", ha="center", fontsize=11)
    axes.text((in_step + every) * width, -0.35, "rounds of every=4 steps", ha="center", fontsize=11)
    return figure


def draw_delay() -> Any:
    """Draw computation and communication over time, with gradients applied at once and a step late."""
    figure = new_figure(9.5, 3.2)
    axes = figure.subplots()
    compute_s, reduce_s, steps = 2.0, 1.6, 4
    axes.set_xlim(-0.05, steps * (compute_s + reduce_s))
    axes.set_ylim(-0.2, 5.2)
    for position, spine in axes.spines.items():
        spine.set_visible(position == "bottom")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("time")
    rows = {(0, "computing"): 4.0, (0, "gradients"): 3.0, (1, "computing"): 1.2, (1, "gradients"): 0.2}
    for (_, name), y in rows.items():
        axes.text(-0.15, y + 0.4, name, ha="right", va="center", fontsize=10)
    for delay, title in enumerate(("applied at once", "--delay 1")):
        axes.text(-0.15, rows[delay, "computing"] + 1.0, title, ha="right", va="center", fontsize=10.5, weight="bold")
        period = compute_s if delay else compute_s + reduce_s
        for step in range(steps):
            start = step * period
            for name, at, width, color in (
                ("computing", start, compute_s, "#D9E2EC"),
                ("gradients", start + compute_s, reduce_s, COLOR[Point.DP_GRAD]),
            ):
                y = rows[delay, name]
                axes.broken_barh([(at, width)], (y, 0.8), facecolor=color, edgecolor="white", linewidth=1.5)
                axes.text(at + width / 2, y + 0.4, f"step {step + 1}", ha="center", va="center", fontsize=9.5)
    return figure


DIAGRAMS = {
    "communication-points": draw_points,
    "1f1b-epilogue": draw_epilogue,
    "1f1b-zb-h1": draw_bubbles,
    "no-flush": draw_no_flush,
    "expert-legs": draw_experts,
    "islands": draw_islands,
    "delay": draw_delay,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all diagrams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "images", help="folder of the pictures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in DIAGRAMS.items():
        print(save_figure(draw(), options.out / f"{name}.png"))
    return 0
