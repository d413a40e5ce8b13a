#!/usr/bin/env python3
"""Draws the two diagrams of the documents: the communication points, and a 1F1B step with its epilogue.

    python tools/draw_diagrams.py                     docs/images
    python tools/draw_diagrams.py --out /tmp/images

The schedule that is drawn is the engine's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.draw_diagrams")

from megatron.compression.points import Point
from megatron.parallel.pipeline.schedule import PipelineOp, find_epilogue, one_f_one_b
from megatron.training.plots import COLORS, new_figure, save_figure

REPO = Path(__file__).resolve().parents[1]

STAGES, MICRO_BATCHES = 4, 8
FORWARD, BACKWARD = 1.0, 2.0
"""Durations, of which a backward's is twice a forward's."""

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


@dataclass(frozen=True)
class Placed:
    """An operation of a stage in time, and whether its message is one of the epilogue."""

    stage: int
    op: PipelineOp
    start: float
    end: float
    late: bool


def placed(stages: int, micro_batches: int) -> list[Placed]:
    """1F1B in time, where messages take none: an operation begins when its rank and its input are ready."""
    schedules = [one_f_one_b(stages, stage, micro_batches) for stage in range(stages)]
    ended: dict[tuple[bool, int, int], float] = {}
    free, reached = [0.0] * stages, [0] * stages
    found: list[Placed] = []
    while any(reached[stage] < len(schedules[stage]) for stage in range(stages)):
        for stage, ops in enumerate(schedules):
            while reached[stage] < len(ops):
                op = ops[reached[stage]]
                source = (op.is_forward, stage - 1 if op.is_forward else stage + 1, op.micro_batch)
                has_source = 0 <= source[1] < stages
                if has_source and source not in ended:
                    break
                start = max(free[stage], ended[source] if has_source else 0.0)
                end = start + (FORWARD if op.is_forward else BACKWARD)
                ended[op.is_forward, stage, op.micro_batch] = free[stage] = end
                found.append(Placed(stage, op, start, end, stage > 0 and op in find_epilogue(ops)))
                reached[stage] += 1
    return found


def draw_schedule() -> Any:
    """1F1B of four stages and eight micro-batches; what the epilogue sends back is hatched."""
    figure = new_figure(10, 3.1)
    axes = figure.add_subplot()
    operations = placed(STAGES, MICRO_BATCHES)
    for one in operations:
        color = COLORS[5] if one.op.is_forward else "#F3C9A5"
        axes.barh(
            one.stage, one.end - one.start, left=one.start, height=0.82, color=COLORS[1] if one.late else color,
            edgecolor="white", hatch="///" if one.late else None, linewidth=1.0,
        )  # fmt: skip
        axes.text(
            (one.start + one.end) / 2, one.stage, str(one.op.micro_batch + 1), ha="center", va="center", fontsize=9,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": color if not one.late else "white", "linewidth": 0},
        )  # fmt: skip
    names = (("forward", COLORS[5], None), ("backward", "#F3C9A5", None))
    bars = [axes.barh(0, 0, color=color, hatch=hatch, label=name) for name, color, hatch in names]
    late = "backward in the epilogue: no forward is left to overlap with its message (when=epilogue)"
    bars.append(axes.barh(0, 0, color=COLORS[1], hatch="///", edgecolor="white", label=late))
    axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
    axes.invert_yaxis()
    axes.set_xlim(0, max(one.end for one in operations))
    axes.set_xticks([])
    axes.set_xlabel("time")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3, frameon=False, fontsize=9)
    return figure


def _box(axes: Any, x: float, y: float, title: str, text: str) -> None:
    axes.add_patch(_rectangle(x, y, 2.3, 1.15, "#F4F6F8"))
    axes.text(x + 1.15, y + 0.78, title, ha="center", va="center", fontsize=9.5, weight="bold")
    axes.text(x + 1.15, y + 0.36, text, ha="center", va="center", fontsize=9, color="#333333")


def _rectangle(x: float, y: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", facecolor=color,
                          edgecolor="#888888", linewidth=1.0)  # fmt: skip


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], point: Point, both: bool = False) -> None:
    style = {"arrowstyle": "<->" if both else "->", "color": COLOR[point], "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def _label(axes: Any, x: float, y: float, points: Sequence[Point], ha: str = "center", more: str = "") -> None:
    text = "\n".join(point.value for point in points) + more
    axes.text(x, y, text, ha=ha, va="center", fontsize=9.5, color=COLOR[points[0]], weight="bold", linespacing=1.3)


def _bracket(axes: Any, side: float, edge: float, levels: tuple[float, float], point: Point) -> None:
    """A connection of two boxes around the outside, at x ``side``, from their edges."""
    high, low = levels
    axes.plot([edge, side, side, edge], [high, high, low, low], color=COLOR[point], linewidth=2.2)
    for level in levels:
        _arrow(axes, (side, level), (edge, level), point)


def draw_points() -> Any:
    """Two replicas of two pipeline stages of two tensor-parallel ranks, and what they send each other where."""
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
    """What two ranks that share the experts of a layer send each other: rows of tokens, and their gradients."""
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
    """Two islands that go in step at first, and then exchange what they have learned after some steps."""
    figure = new_figure(9.5, 3.0)
    axes = figure.subplots()
    axes.set_xlim(-1.0, 12.6)
    axes.set_ylim(-0.7, 3.9)
    axes.axis("off")
    in_step, every, rounds, width = 3, 4, 2, 1.05
    for island, y in enumerate((2.1, 0.2)):
        axes.text(-0.2, y + 0.4, f"island {island}", ha="right", va="center", fontsize=11)
        for step in range(in_step + every * rounds):
            axes.add_patch(_rectangle(step * width, y, width - 0.25, 0.8, "#F4F6F8"))
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


DIAGRAMS = {
    "communication-points": draw_points,
    "1f1b-epilogue": draw_schedule,
    "expert-legs": draw_experts,
    "islands": draw_islands,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "images", help="folder of the pictures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in DIAGRAMS.items():
        print(save_figure(draw(), options.out / f"{name}.png"))
    return 0
