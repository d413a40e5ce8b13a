"""Results of the kernels' benchmark: tables, and the picture that is drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.tables import Column, Table
from megatron.training.plots import COLORS, new_figure, save_figure


@dataclass(frozen=True)
class Row:
    """One operation on one shape, in GB/s and ratios but for the first words and what follows the rival.

    Args:
        seconds: time of the operation.
        traffic: least bytes that it must move.
        how: how its time was measured.
    """

    op: str
    model: str
    shape: str
    setting: str
    gbps: float
    copy_gbps: float
    of_limit: float
    times_twin: float
    times_rival: float
    rival: str
    seconds: float = 0.0
    traffic: int = 0
    how: str = ""


Span = tuple[float, float]
"""The least and the most over shapes."""


@dataclass(frozen=True)
class OpSummary:
    """The results of an operation with a setting, over all shapes."""

    op: str
    setting: str
    gbps: Span
    of_limit: Span
    times_twin: Span
    times_rival: Span
    rival: str


def _rival(ratio: str, rival: str) -> str:
    """A ratio to an operation of others; empty where there is none."""
    return f"{ratio} x {rival}" if rival else ""


ROWS = Table(
    Column("operation", "op"),
    Column("model", "model"),
    Column("shape", "shape"),
    Column("setting", "setting"),
    Column("GB/s of input", "gbps", ".1f"),
    Column("copy GB/s", "copy_gbps", ".1f"),
    Column("of limit", "of_limit", ".2f"),
    Column("x twin", "times_twin", ".1f"),
    Column("x others", lambda row: _rival(f"{row['times_rival']:.1f}", row["rival"])),
)
"""All rows, each as a dictionary."""


def kinds_of(rows: Sequence[Row]) -> list[OpSummary]:
    """Summarizes rows as ranges over models and shapes."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.op, row.setting), []).append(row)

    def span(own: list[Row], name: str) -> Span:
        values = [getattr(row, name) for row in own]
        return min(values), max(values)

    spans = ("gbps", "of_limit", "times_twin", "times_rival")
    return [
        OpSummary(op, setting, **{name: span(own, name) for name in spans}, rival=own[0].rival)
        for (op, setting), own in found.items()
    ]


KINDS = Table(
    Column("operation", "op"),
    Column("setting", "setting"),
    Column("GB/s of input", lambda kind: _text(kind["gbps"], 1)),
    Column("of limit", lambda kind: _text(kind["of_limit"], 2)),
    Column("x twin", lambda kind: _text(kind["times_twin"], 1)),
    Column("x others", lambda kind: _rival(_text(kind["times_rival"], 1), kind["rival"])),
)


def summary(kinds: Sequence[OpSummary]) -> str:
    """A table with one line for each operation and setting."""
    return KINDS.text(map(asdict, kinds))


def _text(span: Span, digits: int) -> str:
    low, high = span
    return f"{low:.{digits}f}" if low == high else f"{low:.{digits}f} to {high:.{digits}f}"


FAMILIES = {
    "fixed point, a scale for each group": lambda kind: kind.setting.endswith(", group"),
    "fixed point, a scale for each channel or tensor": lambda kind: kind.setting.endswith((", channel", ", tensor")),
    "Top-K": lambda kind: kind.setting.endswith("%"),
    "low rank": lambda kind: kind.setting.startswith("rank "),
    "others": lambda kind: True,
}


def draw(kinds: Sequence[OpSummary], path: Path, title: str) -> None:
    """Draws throughput beside the share of the limit, a group of lines for each family of operations."""
    rows: list[OpSummary | str] = []
    left = list(kinds)
    for family, holds in FAMILIES.items():
        own = [kind for kind in left if holds(kind)]
        left = [kind for kind in left if kind not in own]
        rows += [family, *own] if own else []
    figure = new_figure(9.5, 0.185 * len(rows) + 1.3)
    speed, share = figure.subplots(1, 2, sharey=True)
    color = COLORS[0]
    for y, row in enumerate(rows):
        if isinstance(row, str):
            continue
        for panel, (low, high) in ((speed, row.gbps), (share, row.of_limit)):
            panel.plot([low, high], [y, y], color=color, linewidth=3.5, alpha=0.35, solid_capstyle="round")
            hollow = panel is share and high > 1.0
            panel.plot([(low + high) / 2], [y], "o", color=color, markersize=4, mfc="white" if hollow else color)
    names = [row if isinstance(row, str) else f"{row.op}, {row.setting}".rstrip(", ") for row in rows]
    speed.set_yticks(range(len(rows)), names, fontsize=7)
    for label, row in zip(speed.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if isinstance(row, str) else "normal")
    speed.invert_yaxis()
    speed.set_ylim(len(rows) - 0.4, -0.6)
    speed.set(xscale="log")
    speed.set_xlabel("GB/s of input", fontsize=8)
    speed.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    share.set_xlim(left=0)
    share.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    share.set_xlabel("of the limit: the least traffic, at a copy's speed", fontsize=8)
    if any(kind.of_limit[1] > 1.0 for kind in kinds):
        share.set_title("hollow: in place, so a copy is no limit", fontsize=8)
    for panel in (speed, share):
        panel.grid(axis="x", alpha=0.3)
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=8)
    figure.suptitle(f"{title}; dots are the middles of the ranges over shapes", fontsize=9)
    save_figure(figure, path)
