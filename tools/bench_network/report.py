"""Tables and plots of the network benchmark, from its measurements as plain rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training.plots import new_figure, save_figure

Row = dict[str, Any]


def _baseline(rows: Sequence[Row], row: Row, case: str) -> float | None:
    """Seconds of a case on the same link."""
    same = [r["seconds"] for r in rows if (r["layout"], r["setup"], r["case"]) == (row["layout"], row["setup"], case)]
    return same[0] if same else None


def _times(rows: Sequence[Row], row: Row, case: str) -> str:
    base = _baseline(rows, row, case)
    return "" if base is None else f"{base / row['seconds']:.2f}"


def rate_of(rate: float | None) -> str:
    """A link's rate as people write it."""
    return "unshaped" if rate is None else f"{rate / 1e6:.3g} Mb/s"


def table(rows: Sequence[Row]) -> str:
    """One table for each layout and link: time, its parts, bytes, and speed-ups."""
    parts = []
    links = dict.fromkeys((row["layout"], row["setup"]) for row in rows)
    for layout, setup in sorted(links, key=lambda link: list(links).index(link)):
        own = [row for row in rows if (row["layout"], row["setup"]) == (layout, setup)]
        parts.append(f"### {layout}, {setup} ({rate_of(own[0]['rate'])} here)\n")
        parts.append(
            "| case | s / iteration | predicted | tokens/s | compute s | coding s | exposed s | MB a host "
            "| x fp32 | x bf16 |"
        )
        parts.append("|---|---|---|---|---|---|---|---|---|---|")
        for row in own:
            cells = [
                row["case"],
                f"{row['seconds']:.2f}",
                "" if row["predicted_s"] is None else f"{row['predicted_s']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['compute_s']:.2f}",
                f"{row['coded_s']:.3f}",
                f"{row['waited_s']:.2f}",
                f"{row['host_mb']:.2f}",
                _times(rows, row, "fp32 traffic"),
                _times(rows, row, "bf16 traffic"),
            ]
            parts.append("| " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts).rstrip()


def figure(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s against the link's rate, a panel for each layout."""
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    drawn = new_figure(5.5 * len(layouts), 4.2)
    axes = drawn.subplots(1, len(layouts), squeeze=False)
    for axis, layout in zip(axes[0], layouts, strict=True):
        own = [row for row in rows if row["layout"] == layout and row["rate"] is not None]
        for case in dict.fromkeys(row["case"] for row in own):
            points = sorted((row["rate"] / 1e6, row["tokens_per_s"]) for row in own if row["case"] == case)
            style = "--" if case.startswith("torch") else "-"
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=case)
        axis.set(xscale="log", xlabel="link, Mb/s", ylabel="tokens/s", title=layout)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
        axis.grid(alpha=0.3)
    save_figure(drawn, path)
