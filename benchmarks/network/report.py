"""Tables and plots of the network benchmark, from its measurements as plain rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import Column, Table
from megatron.training.plots import curve_style, new_figure, save_figure

Row = dict[str, Any]


def rate_of(rate: float | None) -> str:
    """A link's rate as people write it."""
    return "unshaped" if rate is None else f"{rate / 1e6:.3g} Mb/s"


def _figures(rows: Sequence[Row], row: Row) -> Row:
    """A row with its speed-ups over uncompressed traffic on the same link."""
    link = [other for other in rows if (other["layout"], other["setup"]) == (row["layout"], row["setup"])]
    seconds = {other["case"]: other["seconds"] for other in reversed(link)}
    return {**row, **{case: seconds[case] / row["seconds"] for case in _UNCOMPRESSED if case in seconds}}


_UNCOMPRESSED = ("fp32 traffic", "bf16 traffic")

TABLE = Table(
    Column("case", "case"),
    Column("s / iteration", "seconds", ".2f"),
    Column("predicted", "predicted_s", ".2f"),
    Column("tokens/s", "tokens_per_s", ".0f"),
    Column("compute s", "compute_s", ".2f"),
    Column("coding s", "coded_s", ".3f"),
    Column("exposed s", "waited_s", ".2f"),
    Column("MB a host", "host_mb", ".2f"),
    Column("x fp32", "fp32 traffic", ".2f"),
    Column("x bf16", "bf16 traffic", ".2f"),
)


def table(rows: Sequence[Row]) -> str:
    """Tables of each layout and link: time, its parts, bytes, and speed-ups."""
    links: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        links.setdefault((row["layout"], row["setup"]), []).append(_figures(rows, row))
    return "\n\n".join(
        f"### {layout}, {setup} ({rate_of(own[0]['rate'])} here)\n\n{TABLE.text(own)}"
        for (layout, setup), own in links.items()
    )


LAYOUTS = {
    "pp4": "4 pipeline stages",
    "pp8": "8 pipeline stages",
    "dp4": "4 replicas",
    "dp4-short": "4 replicas, 2 micro-batches an iteration",
    "dp8": "8 replicas",
    "dp2x2": "2 hosts of 2 replicas",
    "ep2x2": "2 hosts of 2 replicas that share 16 experts a layer, 4 a token",
    "ep4": "4 replicas that share 8 experts a layer",
    "3d": "TP 2 x PP 2 x DP 2",
}
_EAGER = ", eager 1F1B"
_PEERS = {"torch DDP": "fp32 traffic", "torch DDP, fp16 hook": "bf16 traffic"}


def traffic_of(case: str) -> tuple[str, bool]:
    """The traffic of a case, and whether it is another way to send that: eager 1F1B, or torch's own."""
    if case.startswith("torch"):
        return _PEERS.get(case, case.replace("torch DDP, powerSGD_hook", "powersgd")), True
    name = case.removesuffix(_EAGER).removesuffix(" (AQ-SGD)")
    return (f"{name} traffic" if name in ("fp32", "bf16") else name), case.endswith(_EAGER)


def figure(rows: Sequence[Row], path: Path) -> None:
    """Draws tokens/s against the link's rate, a panel for each layout; equal traffic has equal colors."""
    rows = [row for row in rows if row["rate"] is not None]
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    columns = min(len(layouts), 2)
    lines = -(-len(layouts) // columns)
    drawn = new_figure(5.6 * columns, 4.4 * lines)
    panels = drawn.subplots(lines, columns, squeeze=False)
    for axis, layout in zip(panels.flat, layouts, strict=False):
        # Layouts of one kind (pp4, pp8) have the same colors.
        alike = [row for row in rows if row["layout"].rstrip("0123456789") == layout.rstrip("0123456789")]
        kinds = list(dict.fromkeys(traffic_of(row["case"])[0] for row in alike))
        _panel(axis, [row for row in rows if row["layout"] == layout], kinds)
        axis.set_title(LAYOUTS.get(layout, layout), fontsize=10)
    for axis in panels.flat[len(layouts) :]:
        axis.remove()
    save_figure(drawn, path)


def _panel(axis: Any, rows: Sequence[Row], kinds: Sequence[str]) -> None:
    """Draws the links of one layout; a case has the color of its traffic's place in ``kinds``."""
    from matplotlib.lines import Line2D

    cases = list(dict.fromkeys(row["case"] for row in rows))
    for number, case in enumerate(cases):
        traffic, other = traffic_of(case)
        style = curve_style(kinds.index(traffic))
        # Thinner and smaller from case to case, so that equal ones show under one another.
        points = sorted((row["rate"] / 1e6, row["tokens_per_s"]) for row in rows if row["case"] == case)
        face = "white" if other else style["color"]
        axis.plot(
            *zip(*points, strict=True), "--" if other else "-", marker=style["marker"], color=style["color"],
            markerfacecolor=face, markersize=6 - 2.5 * number / len(cases), linewidth=2.4 - 1.4 * number / len(cases),
        )  # fmt: skip
    keys = []
    for kind in dict.fromkeys(traffic_of(case)[0] for case in cases):
        style = {**curve_style(kinds.index(kind)), "linestyle": "-", "markersize": 4}
        keys.append(Line2D([], [], **style, label=kind))
    torch = any(case.startswith("torch") for case in cases)
    if torch or any(case.endswith(_EAGER) for case in cases):
        name = "torch's DDP, its nearest hook" if torch else "the same, eager 1F1B"
        keys.append(Line2D([], [], color="grey", linestyle="--", marker="o", mfc="white", markersize=4, label=name))
    axis.legend(handles=keys, fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    links = sorted({(row["rate"] / 1e6, row["setup"]) for row in rows})
    axis.set(xscale="log", ylabel="tokens/s")
    axis.set_xticks([rate for rate, _ in links], [f"{name}\n({rate:.3g})" for rate, name in links], fontsize=6)
    axis.set_xticks([], minor=True)
    axis.set_xlabel("link that is stood for (Mb/s here)", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
