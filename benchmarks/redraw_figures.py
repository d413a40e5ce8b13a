"""Draws the pictures of the documents again from the tables beside them, so that both say the same.

    python -m benchmarks.redraw_figures                      docs/images
    python -m benchmarks.redraw_figures --out /tmp/images --only kernels,network

The benchmarks draw their own pictures when they run; this one needs only what the documents hold.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import REPO, kernel_table
from benchmarks.convergence_figures import Outcome, draw_outcomes
from benchmarks.network.cases import BENCHES
from benchmarks.network.report import figure as draw_network
from megatron.base.errors import UserError
from megatron.base.markdown import table_after
from megatron.training.plots import COLORS, new_figure, save_figure

Time = tuple[str, float, float]
"""A case, the minutes of its run, and its validation loss at the end."""

BENCHMARKS = REPO / "docs" / "benchmarks.md"
COMPRESSION = REPO / "docs" / "compression.md"
EXPERTS = REPO / "docs" / "moe.md"
MACHINE = re.compile(r"`make bench-kernels[^`]*`, ([\d-]+), (.*?)\. Shapes", re.DOTALL)
LINK = re.compile(r"(?P<name>.+) \((?P<rate>[\d.]+) Mb/s here\)")


def network_rows(text: str) -> list[dict[str, Any]]:
    """Measurements of the four layouts, in the form that the benchmark's picture takes."""
    found = []
    for layout in ("pp4", "pp8", "dp4", "dp8"):
        bench = BENCHES[layout]
        tokens = bench.micro_batches * bench.dp * bench.model[2]
        for row in table_after(text, f"--layouts {layout}"):
            for column, seconds in row.items():
                if link := LINK.fullmatch(column):
                    where = {"layout": layout, "setup": link["name"], "rate": float(link["rate"]) * 1e6}
                    found.append({**where, "case": row["traffic"], "tokens_per_s": tokens / float(seconds)})
    return found


_COSTS, _FORMATS = "## What it costs in loss", "### Formats of the wire, and what a model goes on with"
_LEGS = "### What the legs cost in loss"


def outcomes(text: str, mark: str = _COSTS) -> list[Outcome]:
    """The outcomes in the convergence table below a headline."""
    found = []
    for row in table_after(text, mark):
        sent = {name.removesuffix(" kB"): float(cell) for name, cell in row.items() if name.endswith(" kB")}
        sent.pop("total")
        loss, _, spread = row["validation loss"].partition(" ± ")
        worse = float(row["vs dense"].strip("%+"))
        found.append(Outcome(row["case"], float(loss), float(spread), worse, sent))
    return found


def times(text: str) -> list[Time]:
    """The table of whole runs on slow links."""
    rows = table_after(text, "### Time to a loss")
    return [(row["traffic"], float(row["minutes"]), float(row["validation loss at the end"])) for row in rows]


def draw_times(runs: Sequence[Time], out: Path) -> None:
    """Draws a bar for each run, as long as it took, with its final loss."""
    figure = new_figure(7.5, 0.42 * len(runs) + 0.9)
    axis = figure.add_subplot()
    bars = axis.barh([case for case, *_ in runs], [minutes for _, minutes, _ in runs], height=0.6, color=COLORS[0])
    axis.bar_label(bars, [f"validation loss {loss:.3f}" for *_, loss in runs], padding=4, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(right=1.3 * max(minutes for _, minutes, _ in runs))
    axis.set_xlabel("minutes of training", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    save_figure(figure, out)


def _kernels(out: Path) -> None:
    text = BENCHMARKS.read_text()
    where = MACHINE.search(text)
    title = " ".join(where[2].split()) if where else ""
    kernel_table.draw(kernel_table.read_summary(text), out, title)


PICTURES: dict[str, Callable[[Path], None]] = {
    "kernels": _kernels,
    "network": lambda out: draw_network(network_rows(BENCHMARKS.read_text()), out),
    "convergence": lambda out: draw_outcomes(outcomes(COMPRESSION.read_text()), out),
    "convergence-formats": lambda out: draw_outcomes(outcomes(COMPRESSION.read_text(), _FORMATS), out),
    "convergence-experts": lambda out: draw_outcomes(outcomes(EXPERTS.read_text(), _LEGS), out),
    "time-to-loss": lambda out: draw_times(times(BENCHMARKS.read_text()), out),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "images", help="folder (docs/images)")
    parser.add_argument("--only", default=",".join(PICTURES), help=f"comma-separated, of {', '.join(PICTURES)}")
    options = parser.parse_args(arguments)
    try:
        for name in options.only.split(","):
            if name not in PICTURES:
                raise UserError(f"--only {name}: choose from {', '.join(PICTURES)}")
            PICTURES[name](options.out / f"{name}.png")
            print(options.out / f"{name}.png")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
