"""Tables and figures of the experiments, from the runs' JSON lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.config.errors import UserError
from megatron.training.plots import new_figure, save_figure
from megatron.training.sinks import read_events

Events = list[dict[str, Any]]
_WARM = 2
"""Iterations at the start that do not count for times."""


def write_report(kind: str, title: str, runs: Mapping[str, Path], folder: Path) -> str:
    """Reads the logs that are there, writes ``report.md`` and ``figure.png``, and returns the text.

    Args:
        kind: losses, breakdown, perplexity, orthogonality or memory.
        title: of the experiment.
        runs: folder of each scheme.
        folder: where the report goes.

    Raises:
        UserError: when no scheme has a log yet.
    """
    found: dict[str, Events] = {}
    for scheme, out in runs.items():
        if (out / "log.jsonl").exists():
            found[scheme] = read_events(out / "log.jsonl")
    found = {scheme: events for scheme, events in found.items() if _of(events, "train")}
    if not found:
        raise UserError(f"no logs in {folder} yet: run the experiment first")
    table, draw = _REPORTS[kind](found)
    missing = [scheme for scheme in runs if scheme not in found]
    note = f"\n\nNo log yet of {', '.join(missing)}." if missing else ""
    text = f"## {title}\n\n{table}{note}"
    (folder / "report.md").write_text(text + "\n")
    if draw is not None:
        figure = new_figure(7.5, 4.5)
        draw(figure.add_subplot())
        save_figure(figure, folder / "figure.png")
        text += f"\n\n{folder / 'figure.png'}"
    return text


Drawing = Callable[[Any], None]
Report = tuple[str, Drawing | None]


def _of(events: Events, kind: str) -> Events:
    return [event for event in events if event.get("kind") == kind]


def _rows(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _mean(events: Events, pick: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(pick(event) for event in (events[_WARM:] or events))


def _point(event: dict[str, Any], field: str) -> float:
    """A figure of the ledger, over all points."""
    return sum(figures.get(field, 0.0) for name, figures in event.get("comm", {}).items() if name != "control")


def _losses(found: Mapping[str, Events]) -> Report:
    rows = []
    for scheme, events in found.items():
        train = _of(events, "train")
        raw, sent = _mean(train, lambda e: _point(e, "raw_bytes")), _mean(train, lambda e: _point(e, "wire_bytes"))
        losses = [f"{event['lm_loss']:.4f}" for event in (train[0], train[-1])]
        rows.append([scheme, str(train[-1]["iteration"]), *losses, f"{sent / 1e6:.3f}", f"{raw / sent:.2f}"])
    head = ["scheme", "iterations", "first loss", "last loss", "MB an iteration", "times fewer"]
    return _rows(head, rows), None


def breakdown(events: Events) -> dict[str, float]:
    """Seconds of an iteration: all, coding, exposed by point, and the rest, which is computing."""
    train = _of(events, "train")
    parts = {"all": _mean(train, lambda e: e["seconds_per_iteration"])}
    parts["coding"] = _mean(train, lambda e: _point(e, "coded_s"))
    points = dict.fromkeys(name for event in train for name in event.get("comm", {}) if name != "control")
    for point in points:
        parts[f"exposed: {point}"] = _mean(train, lambda e, p=point: e["comm"].get(p, {}).get("waited_s", 0.0))  # type: ignore[misc]
    parts["compute"] = max(parts["all"] - sum(value for name, value in parts.items() if name != "all"), 0.0)
    return parts


def _breakdown(found: Mapping[str, Events]) -> Report:
    parts = {scheme: breakdown(events) for scheme, events in found.items()}
    columns = ["compute", "coding", *dict.fromkeys(n for p in parts.values() for n in p if n.startswith("exposed"))]
    base = next(iter(parts.values()))["all"]
    rows = []
    for scheme, own in parts.items():
        cells = [f"{own.get(column, 0.0):.4f}" for column in columns]
        rows.append([scheme, f"{own['all']:.4f}", *cells, f"{base / own['all']:.2f}"])
    head = ["scheme", "s / iteration", *columns, f"times {next(iter(parts))}"]
    note = "\n\nEach part is the slowest rank's, so that parts may overlap; computing is what they leave of the time."

    def draw(axes: Any) -> None:
        left = [0.0] * len(parts)
        for column in columns:
            widths = [own.get(column, 0.0) for own in parts.values()]
            axes.barh(list(parts), widths, left=left, label=column)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("seconds an iteration")
        axes.legend(fontsize=7, frameon=False)

    return _rows(head, rows) + note, draw


def _perplexity(found: Mapping[str, Events]) -> Report:
    rows = []
    for scheme, events in found.items():
        train, valid = _of(events, "train"), _of(events, "validation")
        loss = valid[-1]["lm_loss"] if valid else None
        figures = ["", ""] if loss is None else [f"{loss:.4f}", f"{math.exp(min(loss, 20.0)):.2f}"]
        days = sum(event["seconds_per_iteration"] for event in train) / 86400
        rows.append([scheme, str(train[-1]["iteration"]), *figures, f"{days:.3g}"])
    head = ["scheme", "iterations", "validation loss", "perplexity", "days"]

    def draw(axes: Any) -> None:
        for scheme, events in found.items():
            points = [(event["iteration"], event["lm_loss"]) for event in _of(events, "validation")]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=scheme)
        axes.set(xlabel="iteration", ylabel="validation loss, nats per token")
        axes.legend(frameon=False)

    return _rows(head, rows), draw


def _orthogonality(found: Mapping[str, Events]) -> Report:
    rows, series = [], {}
    for scheme, events in found.items():
        probes = [event for event in _of(events, "orthogonality") if event["cosine_sim"]]
        if not probes:
            continue
        cosines = [statistics.fmean(event["cosine_sim"]) for event in probes]
        largest = max(abs(cosine) for event in probes for cosine in event["cosine_sim"])
        means = [statistics.fmean([abs(x) for e in probes for x in e[k]]) for k in ("error_avg", "acti_delta_avg")]
        series[scheme] = ([event["iteration"] for event in probes], cosines)
        rows.append([scheme, f"{statistics.fmean(cosines):+.4f}", f"{largest:.4f}", *(f"{x:.2e}" for x in means)])
    head = ["scheme", "mean cosine", "largest |cosine|", "mean |error average|", "mean |change average|"]

    def draw(axes: Any) -> None:
        for scheme, (iterations, cosines) in series.items():
            axes.plot(iterations, cosines, linewidth=1, label=scheme)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set(xlabel="iteration", ylabel="cosine: error and change of the activation", ylim=(-1, 1))
        axes.legend(frameon=False)

    return _rows(head, rows), draw


def _memory(found: Mapping[str, Events]) -> Report:
    peaks = {s: max(event["memory_bytes"] for event in _of(events, "train")) / 1e6 for s, events in found.items()}
    base = next(iter(peaks.values()))
    rows = [[scheme, f"{peak:.0f}", f"{peak - base:+.0f}", f"{peak / base:.3f}"] for scheme, peak in peaks.items()]

    def draw(axes: Any) -> None:
        axes.bar(list(peaks), list(peaks.values()))
        axes.set_ylabel("peak memory of a rank, MB")

    return _rows(["scheme", "peak MB", "above the first", "times the first"], rows), draw


_REPORTS: dict[str, Callable[[Mapping[str, Events]], Report]] = {
    "losses": _losses,
    "breakdown": _breakdown,
    "perplexity": _perplexity,
    "orthogonality": _orthogonality,
    "memory": _memory,
}
