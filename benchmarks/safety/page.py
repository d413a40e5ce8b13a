"""A card as a page of Markdown, with its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.safety.card import Content
from megatron.base.figures import COLORS, new_figure, save_figure
from megatron.base.markdown import markdown_table


def _interval(ends: Sequence[float]) -> str:
    low, high = (f"{end:+.2f}%" if abs(end) < 1000 else f"{end:+.0e}%" for end in ends)
    return f"{low} to {high}"


def _head(content: Content) -> list[str]:
    header, cost, main = content["header"], content["cost"], content["main"]
    form = "" if content["form"] == "full" else f" **{content['form'].capitalize()} form**: fewer sizes and steps."
    return [
        f"# `{content['spec']}`",
        "",
        f"{header['date']}, {header['cpus']} cores ({header['device']}), torch {header['torch']}, commit "
        f"{header['commit']}.{form} Cost: {cost['hours']:.2f} hours ({cost['cpu_hours']:.2f} of processors) for "
        f"{cost['runs']} runs; {cost['dense_hours']:.2f} of these for dense runs, which cards of a layout share.",
        "",
        f"Layout: {content['layout']}. Main size: {main['layers']} layers, width {main['width']}, {main['tokens']:,} "
        "tokens.",
    ]


def _loss(content: Content) -> list[str]:
    loss = content["loss"]
    percents = ", ".join(f"{percent:+.3f}%" for percent in loss["percents"])
    return [
        "## Loss",
        "",
        f"**{loss['verdict']}**: mean difference of the validation loss {loss['mean']:+.3f}%, 95% interval "
        f"{_interval(loss['interval_95'])}, of {len(loss['percents'])} paired seeds ({percents}). Two one-sided tests "
        f"with a margin of {loss['margin']:g}%: p = {loss['equivalence_p']:.3f}, 90% interval "
        f"{_interval(loss['interval_90'])}.",
    ]


def _law(content: Content) -> list[str]:
    law = content["law"]
    kind = "a power law" if law["is_power"] else "a linear law of logarithms, as some gaps are below zero"
    predicted = law["predicted"]
    outcome = "inside" if law["within"] else "outside"
    rows: dict[tuple[int, int, int, int], list[str]] = {}
    for gap in law["gaps"]:
        key = gap["width"], gap["iterations"], gap["parameters"], gap["tokens"]
        rows.setdefault(key, []).append(f"{gap['percent']:+.3f}%")
    cells = [
        [width, f"{parameters:,}", f"{tokens:,}", ", ".join(percents)]
        for (width, _, parameters, tokens), percents in rows.items()
    ]
    return [
        "## Law of the gap",
        "",
        markdown_table(["width", "parameters N", "tokens D", "gaps"], cells),
        "",
        f"{law['formula']} ({kind}; ± are 95% intervals with {law['freedom']} degrees of freedom).",
        "",
        f"Held-out size, width {law['heldout_width']} (N = {law['heldout'][0]['parameters']:,}, D = "
        f"{law['heldout'][0]['tokens']:,}): predicted {predicted['percent']:+.3f}%, 95% interval "
        f"{_interval((predicted['low'], predicted['high']))}; "
        f"measured {law['measured']:+.3f}%, {outcome} the interval.",
    ]


def _canaries(content: Content) -> list[str]:
    canaries = content["canaries"]
    rows = [
        [task, f"{100 * canaries['dense_exact'][task]:.1f}%", f"{100 * share:.1f}%"]
        for task, share in canaries["exact"].items()
    ]
    note = (
        [] if canaries["mastered"] else ["", "The dense model has not mastered all of them: below 95% they say little."]
    )
    return [
        "## Canaries",
        "",
        markdown_table(["task", "dense", "compressed"], rows),
        "",
        f"Exact match on {canaries['prompts']} held-out prompts each, greedy decoding, {_seeds(canaries['seeds'])}.",
        *note,
    ]


def _seeds(count: int) -> str:
    return f"mean of {count} seeds" if count > 1 else "one seed"


def _behavior(content: Content) -> list[str]:
    behavior = content["behavior"]
    rows = [
        ["compressed and its dense twin", f"{100 * behavior['flips']:.1f}%", f"{behavior['kl']:.4f}"],
        ["two dense seeds", f"{100 * behavior['dense_flips']:.1f}%", f"{behavior['dense_kl']:.4f}"],
        [
            "ratio",
            _ratio(behavior["flips"], behavior["dense_flips"]),
            _ratio(behavior["kl"], behavior["dense_kl"]),
        ],
    ]
    return [
        "## Flips and KL",
        "",
        markdown_table(["models", "flips", "KL, nats"], rows),
        "",
        f"Flips: share of {behavior['places']:,} held-out tokens whose likeliest next token changes.",
    ]


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2g}" if reference else "-"


def _bytes(content: Content) -> list[str]:
    compressed, dense = content["bytes"]["compressed"], content["bytes"]["dense"]
    points = sorted({*compressed["by_point"], *dense["by_point"]})
    rows = [
        [point, *(f"{side['by_point'].get(point, 0.0) / 1000:.1f}" for side in (dense, compressed))] for point in points
    ]
    rows.append(["total", *(f"{side['total'] / 1000:.1f}" for side in (dense, compressed))])
    lines = []
    for name, side in (("dense", dense), ("compressed", compressed)):
        if side["reason"]:
            lines.append(f"- {name}: counters are not compared: {side['reason']}")
            continue
        connections = "unknown" if side["connections"] is None else f"{side['connections'] / 1000:.1f} kB"
        interfaces = f"{side['interfaces'] / 1000:.1f} kB ({', '.join(side['names'])}, with other programs)"
        lines.append(
            f"- {name}: {side['ledger'] / 1000:.1f} kB by the ledger; {connections} by the kernel's counters of the "
            f"connections; {interfaces} by the interfaces"
        )
    return [
        "## Bytes",
        "",
        markdown_table(["point", "dense, kB", "compressed, kB"], rows),
        "",
        f"Of an iteration, all {content['ranks']} ranks, by the ledger. With validation, beside the kernel's counters:",
        "",
        *lines,
    ]


def _speed(content: Content) -> list[str]:
    speed = content["speed"]
    if speed is None:
        return ["## Speed", "", "Not measured: give --link."]
    rows = [
        [name, ", ".join(f"{1000 * s:.0f}" for s in seconds), f"{host_mb:.2f}"]
        for name, seconds, host_mb in (
            ("dense", speed["dense_seconds"], speed["dense_host_mb"]),
            ("compressed", speed["seconds"], speed["host_mb"]),
        )
    ]
    return [
        "## Speed",
        "",
        markdown_table(["side", "ms an iteration, by turn", "MB a host"], rows),
        "",
        f"{speed['ratio']:.2f} x dense on links of {speed['link']}, hosts in namespaces. MB are of an iteration by the "
        f"interface's counter, the start of the run included. Load of the machine before: {speed['load']:.1f}.",
    ]


def page_of(content: Content, picture: str) -> str:
    """Return the card as Markdown."""
    sections = (_head, _loss, _law, _canaries, _behavior, _bytes, _speed)
    parts = ["\n".join(section(content)) for section in sections]
    return "\n\n".join([parts[0], f"![The card as a picture]({picture})", *parts[1:]]) + "\n"


def draw_card(content: Content, path: Path) -> None:
    """Draw a card: differences, law, canaries and flips."""
    figure = new_figure(11.0, 2.9)
    differences, law, canaries, behavior = figure.subplots(1, 4, width_ratios=(1.0, 1.1, 1.2, 0.8))
    _draw_differences(differences, content["loss"])
    _draw_law(law, content["law"])
    tasks = list(content["canaries"]["exact"])
    _bars(canaries, tasks, [100 * content["canaries"][key][task] for key in ("dense_exact", "exact") for task in tasks])
    canaries.set_ylim(0, 105)
    canaries.set_title("canaries: exact, %", fontsize=8)
    canaries.legend(["dense", "compressed"], fontsize=7, loc="lower right")
    figures = content["behavior"]
    dense, twins = ((100 * figures[f"{side}flips"], 100 * figures[f"{side}kl"]) for side in ("dense_", ""))
    _bars(behavior, ["flips, %", "KL, 0.01 nats"], [*dense, *twins])
    behavior.set_title("two dense seeds; dense twin", fontsize=8)
    for panel in (differences, law, canaries, behavior):
        panel.tick_params(labelsize=7)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    figure.suptitle(content["spec"], fontsize=9)
    save_figure(figure, path)


def _draw_differences(panel: Any, loss: Content) -> None:
    panel.axhspan(-loss["margin"], loss["margin"], color=COLORS[2], alpha=0.15)
    percents, (low, high) = loss["percents"], loss["interval_95"]
    panel.plot(range(1, len(percents) + 1), percents, "o", color=COLORS[0], markersize=4)
    middle, half = len(percents) + 1.0, (high - low) / 2
    panel.errorbar([middle], [loss["mean"]], yerr=[half], fmt="s", color=COLORS[1], markersize=4, capsize=3)
    panel.set_xticks([*range(1, len(percents) + 1), middle], [*map(str, range(1, len(percents) + 1)), "mean"])
    panel.set_title("loss above dense, %, by seed", fontsize=8)


def _draw_law(panel: Any, law: Content) -> None:
    budgets = sorted({gap["iterations"] for gap in law["gaps"]})
    for number, budget in enumerate(budgets):
        gaps = [gap for gap in law["gaps"] if gap["iterations"] == budget]
        label = f"{gaps[0]['tokens']:,} tokens"
        xs, ys = [gap["parameters"] for gap in gaps], [gap["percent"] for gap in gaps]
        panel.plot(xs, ys, "o", color=COLORS[number], markersize=4, label=label)
    size, predicted = law["heldout"][0]["parameters"], law["predicted"]
    panel.plot([size], [law["measured"]], "D", color=COLORS[1], markersize=5, label="held out")
    panel.plot([size], [predicted["percent"]], "x", color=COLORS[6], markersize=6, label="predicted")
    panel.set(xscale="log")
    sizes = sorted({size, *(gap["parameters"] for gap in law["gaps"])})
    panel.set_xticks(sizes, [f"{count / 1e6:.2f}" for count in sizes])
    panel.set_xticks([], minor=True)
    panel.set_title("gap, %, by million parameters", fontsize=8)
    panel.legend(fontsize=6)


def _bars(panel: Any, names: Sequence[str], values: Sequence[float]) -> None:
    """Draw two bars for each name: first the dense values, then the others."""
    count = len(names)
    for side, color in ((0, COLORS[6]), (1, COLORS[0])):
        places = [index + 0.4 * side - 0.2 for index in range(count)]
        panel.bar(places, values[side * count : (side + 1) * count], width=0.36, color=color, alpha=0.8)
    panel.set_xticks(range(count), names)
