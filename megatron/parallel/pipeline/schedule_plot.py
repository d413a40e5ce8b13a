"""Plot of pipeline schedules: the passes of every pipeline rank over time."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron.base.errors import UserError
from megatron.base.figures import COLORS, new_figure
from megatron.parallel.pipeline.schedule import Pass, TimedPass

MAX_PASSES = 5000
"""Maximum number of passes in a picture, which takes seconds to draw."""
MAX_RANKS = 256
"""Maximum number of pipeline ranks in a picture."""

_NAMES = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward", Pass.WEIGHT: "weight gradients"}
_COLORS = {Pass.FORWARD: COLORS[5], Pass.BACKWARD: COLORS[4], Pass.WEIGHT: COLORS[2]}
_GAP_COLOR = "#EEEEEE"
_POINTS = 8.0
"""Size of numbers."""
_MIN_POINTS = 4.0
"""Minimum size of numbers in narrow passes, for readers who can enlarge the picture."""
_DIGIT_INCHES = 0.07
"""Width of a digit of ``_POINTS``."""
_MAX_INCHES, _MAX_PASS_INCHES = 60.0, 0.45
"""Maximum width of a picture, and its maximum for each pass of a rank, as a rank may wait for most of the time."""


@dataclass(frozen=True)
class Timeline:
    """The passes of a step.

    Args:
        title: description of the step.
        rows: passes of every pipeline rank, in order of time; at least one pass takes time.
        names: names of the rows.
    """

    title: str
    rows: Sequence[Sequence[TimedPass]]
    names: Sequence[str]

    @property
    def passes(self) -> list[TimedPass]:
        """The passes of all rows."""
        return [timed for row in self.rows for timed in row]


def check_size(flag: str, ranks: int, passes: int) -> None:
    """Check that a picture can be drawn.

    Args:
        flag: flag that asks for the picture, for the message.
        ranks: number of rows.
        passes: number of boxes.

    Raises:
        UserError: when the picture would be too large.
    """
    if ranks > MAX_RANKS or passes > MAX_PASSES:
        raise UserError(
            f"{flag}: {passes:,} passes on {ranks:,} pipeline ranks are too many for a picture; draw a step of at most "
            f"{MAX_PASSES:,} passes on {MAX_RANKS} ranks"
        )


def find_span(rows: Sequence[Sequence[TimedPass]]) -> tuple[float, float]:
    """Find the start of the first pass and the end of the last."""
    return min(timed.start_s for row in rows for timed in row), max(timed.end_s for row in rows for timed in row)


def compute_bubble(rows: Sequence[Sequence[TimedPass]]) -> float:
    """Compute the share of time in which a rank runs no pass, averaged over the ranks."""
    start_s, end_s = find_span(rows)
    return 1 - sum(timed.seconds for row in rows for timed in row) / (len(rows) * (end_s - start_s))


def summarize_times(span_s: float, bubble: float, step_s: float | None = None) -> str:
    """Format a line with the times of a step.

    Args:
        span_s: seconds from the start of the first pass to the end of the last.
        bubble: share of ``span_s`` in which a rank runs no pass, averaged over the ranks.
        step_s: seconds of the step, with the optimizer; None if it consists of the passes alone.
    """
    step = "" if step_s is None else f"step {_format_ms(step_s)}, "
    return f"{step}passes {_format_ms(span_s)}, bubble {bubble:.1%}"


def _format_ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def draw_schedule(timelines: Sequence[Timeline]) -> Any:
    """Draw timelines below each other on the same time axis; return the figure.

    Raises:
        UserError: when matplotlib is missing.
    """
    passes = [timed for timeline in timelines for timed in timeline.passes]
    span_s = max(end_s - start_s for start_s, end_s in (find_span(timeline.rows) for timeline in timelines))
    digits = len(str(max(timed.op.micro_batch for timed in passes) + 1))
    most = max(len(row) for timeline in timelines for row in timeline.rows)
    # Room for the number of a typical pass of the kind with the least room; three quarters of the passes have more.
    rooms: dict[Pass, list[float]] = defaultdict(list)
    for row in (row for timeline in timelines for row in timeline.rows):
        for timed, room_s in zip(row, _find_rooms(row), strict=True):
            if room_s > 0:
                rooms[timed.op.computation].append(room_s)
    typical_room = min(sorted(values)[len(values) // 4] for values in rooms.values())
    axes_inches = span_s / typical_room * _DIGIT_INCHES * (digits + 1)
    axes_inches = max(min(axes_inches, _MAX_PASS_INCHES * most, _MAX_INCHES), 7.0)
    heights = [len(timeline.rows) * 0.34 for timeline in timelines]
    figure = new_figure(axes_inches + 1.0, sum(heights) + 0.7 * len(timelines) + 0.9)
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        draw_passes(axes, timeline, axes_inches / (1000 * span_s))
        lines = (textwrap.fill(line, int(14 * axes_inches)) for line in timeline.title.split("\n"))
        axes.set_title("\n".join(lines), loc="left", fontsize=9)
    panels[-1].set_xlim(0.0, 1000 * span_s)
    panels[-1].set_xlabel("ms")
    patches = make_legend_patches(passes)
    columns = math.ceil(len(patches) / 2) if len(patches) > 5 else len(patches)
    legend = figure.legend(handles=patches, loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
    legend.set_title("number: micro-batch, from 1", prop={"size": 8})
    legend.set_alignment("left")
    return figure


def _find_rooms(row: Sequence[TimedPass]) -> list[float]:
    """Find the time that the number of each pass may cover: the pass, and up to half of the gaps beside it."""
    gaps = [math.inf, *(max(after.start_s - before.end_s, 0.0) for before, after in pairwise(row)), math.inf]
    return [timed.seconds + min(adjacent) for timed, adjacent in zip(row, pairwise(gaps), strict=True)]


def draw_passes(axes: Any, timeline: Timeline, inches_per_ms: float) -> None:
    """Draw a timeline: a box for each pass, with the number of its micro-batch where there is room.

    Args:
        axes: matplotlib axes.
        timeline: the passes.
        inches_per_ms: scale of the time axis.
    """
    chunks = 1 + max(timed.op.chunk for timed in timeline.passes)
    start_s, end_s = find_span(timeline.rows)
    for number, row in enumerate(timeline.rows):
        boxes: dict[tuple[Pass, int], list[tuple[float, float]]] = defaultdict(list)
        for timed, room_s in zip(row, _find_rooms(row), strict=True):
            start_ms, width = 1000 * (timed.start_s - start_s), 1000 * timed.seconds
            boxes[timed.op.computation, timed.op.chunk].append((start_ms, width))
            text = str(timed.op.micro_batch + 1)
            size = min(1.0, 1000 * room_s * inches_per_ms / (_DIGIT_INCHES * (len(text) + 0.3))) * _POINTS
            if size >= _MIN_POINTS:
                center = {"ha": "center", "va": "center_baseline", "fontsize": size}
                axes.text(start_ms + width / 2, number, text, **center).set_in_layout(False)
        for (computation, chunk), spans in boxes.items():
            # A border would hide a box that is as narrow.
            borders = [0.7 if width * inches_per_ms > 0.04 else 0.0 for _, width in spans]
            style = {"facecolor": _pick_color(computation, chunk, chunks), "edgecolor": "white", "linewidth": borders}
            axes.broken_barh(spans, (number - 0.44, 0.88), **style)
    axes.axvspan(0.0, 1000 * (end_s - start_s), color=_GAP_COLOR, linewidth=0, zorder=0)
    axes.set_ylim(len(timeline.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.rows)), timeline.names)
    axes.tick_params(axis="y", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _pick_color(computation: Pass, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Color of a chunk's passes, lighter for later chunks."""
    from matplotlib.colors import to_rgb

    white = 0.7 * chunk / max(chunks - 1, 1)
    red, green, blue = (white + (1 - white) * channel for channel in to_rgb(_COLORS[computation]))
    return red, green, blue


def make_legend_patches(passes: Sequence[TimedPass]) -> list[Any]:
    """Make the entries of a legend: kinds of passes, by chunk, and gaps."""
    from matplotlib.patches import Patch

    kinds = {timed.op.computation for timed in passes}
    chunks = 1 + max(timed.op.chunk for timed in passes)
    patches = []
    for computation in (computation for computation in Pass if computation in kinds):
        for chunk in range(chunks) if chunks <= 4 else (0, chunks - 1):
            suffix = f", chunk {chunk + 1}" if chunks > 1 else ""
            color = _pick_color(computation, chunk, chunks)
            patches.append(Patch(facecolor=color, label=f"{_NAMES[computation]}{suffix}"))
    return [*patches, Patch(facecolor=_GAP_COLOR, label="no pass")]
