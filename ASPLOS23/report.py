"""Tables and figures of the experiments, from the runs' JSON lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.base.figures import COLORS, curve_style, label_iterations, new_figure, save_figure
from megatron.base.markdown import markdown_table
from megatron.training.plots import of_final_draw
from megatron.training.records import Record, finite_figures, read_records

Events = list[Record]
_WARM = 2
"""Iterations at the start that do not count for times."""


def write_report(kind: str, title: str, runs: Mapping[str, Path], folder: Path) -> str:
    """Reads the logs that are there, writes ``report.md`` and ``figure.png``, and returns the text.

    Args:
        kind: losses, breakdown, perplexity, orthogonality or memory.
        title: title of the experiment.
        runs: folder of each scheme; a scheme that took turns with others has a log for each round.
        folder: where the report goes.

    Raises:
        UserError: when no scheme has a log yet, or one cannot be read.
        OSError: when the report cannot be written.
    """
    found = {scheme: rounds for scheme, out in runs.items() if (rounds := _read_rounds(out))}
    if not found:
        raise UserError(f"no logs in {folder} yet: run the experiment first")
    if kind == "breakdown":
        table, draw = _breakdown(found, local=any(map(round_logs, runs.values())))
    else:
        table, draw = _REPORTS[kind]({scheme: rounds[-1] for scheme, rounds in found.items()})
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


def round_logs(out: Path) -> list[Path]:
    """The logs of the rounds of a scheme that took turns with others; none of one that ran once."""
    return sorted(out.glob("round*/log.jsonl"))


def _read_rounds(out: Path) -> list[Events]:
    """Events of each round of a scheme, or of its only run, where there was training.

    Raises:
        UserError: when a log cannot be read.
    """
    rounds = []
    for log in round_logs(out) or [out / "log.jsonl"]:
        try:
            if log.exists():
                rounds.append(read_records(log))
        except OSError as error:
            raise UserError(f"{log}: {error.strerror}; make it readable") from error
    return [events for events in rounds if _of(events, "train")]


Drawing = Callable[[Any], None]
Report = tuple[str, Drawing | None]


def _of(events: Events, kind: str) -> Events:
    return [event for event in events if event.get("kind") == kind]


def _mean(events: Events, pick: Callable[[Record], float]) -> float:
    return statistics.median(finite_figures(pick(event) for event in (events[_WARM:] or events)))


def _points(event: Record) -> dict[str, Record]:
    """The ledger's figures of each point; none in a log without a ledger."""
    points = event.groups("comm") if "comm" in event else {}
    return {name: figures for name, figures in points.items() if name != "control"}


def _point(event: Record, field: str) -> float:
    """A figure of the ledger, over all points; nan in a log without a ledger."""
    return sum(figures.number(field, 0.0) for figures in _points(event).values()) if "comm" in event else math.nan


def _cell(value: float, form: str) -> str:
    """The text of a cell; empty for values that the log lacks."""
    return "" if math.isnan(value) else f"{value:{form}}"


def _over(value: float, other: float) -> float:
    return value / other if other else math.nan


def _loss(event: Record) -> str:
    """The loss of an event: empty where there is none, nan where it was not finite."""
    return f"{event.number('lm_loss'):.4f}" if "lm_loss" in event else ""


def _losses(found: Mapping[str, Events]) -> Report:
    trains = {scheme: _of(events, "train") for scheme, events in found.items()}
    points = list(dict.fromkeys(name for train in trains.values() for event in train for name in _points(event)))
    rows = []
    for scheme, train in trains.items():
        raw, sent = _mean(train, lambda e: _point(e, "raw_bytes")), _mean(train, lambda e: _point(e, "wire_bytes"))
        bytes_cells = [_cell(sent / 1e6, ".3f"), _cell(_over(raw, sent), ".2f")]
        bytes_cells += [_cell(_mean(train, lambda e, p=point: _sent(e, p)) / 1e6, ".3f") for point in points]  # type: ignore[misc]
        rows.append([scheme, str(train[-1].iteration()), _loss(train[0]), _loss(train[-1]), *bytes_cells])
    head = ["scheme", "iterations", "first loss", "last loss", "MB an iteration", "times fewer"]
    return markdown_table([*head, *(f"{point} MB" for point in points)], rows), None


def _sent(event: Record, point: str) -> float:
    if "comm" not in event:
        return math.nan
    figures = _points(event).get(point)
    return 0.0 if figures is None else figures.number("wire_bytes", 0.0)


def _waited(event: Record, point: str) -> float:
    figures = _points(event).get(point)
    return 0.0 if figures is None else figures.number("waited_s", 0.0)


def breakdown(events: Events) -> dict[str, float]:
    """Seconds of an iteration: all, coding, exposed by point, and the rest, which is computing."""
    train = _of(events, "train")
    parts = {"all": statistics.median(finite_figures(_seconds(train)))}
    parts["coding"] = _mean(train, lambda e: _point(e, "coded_s"))
    for point in dict.fromkeys(name for event in train for name in _points(event)):
        parts[f"exposed: {point}"] = _mean(train, lambda e, p=point: _waited(e, p))  # type: ignore[misc]
    parts["compute"] = max(parts["all"] - sum(value for name, value in parts.items() if name != "all"), 0.0)
    return parts


@dataclass(frozen=True)
class _Times:
    """Seconds of an iteration of a scheme.

    Args:
        parts: median of each part over the rounds.
        least, most: range of the whole iteration over the rounds, or over the iterations of a run without rounds.
        comparable: whether the range shows how much runs of one scheme differ.
    """

    parts: dict[str, float]
    least: float
    most: float
    comparable: bool

    @staticmethod
    def of(rounds: Sequence[Events], local: bool) -> _Times:
        """Times of the rounds of a scheme on this machine, or of its run elsewhere.

        A round that ended during its warm-up counts only where all did.
        """
        rounds = [events for events in rounds if len(_of(events, "train")) > _WARM] or rounds
        broken = [breakdown(events) for events in rounds]
        names = dict.fromkeys(name for parts in broken for name in parts)
        parts = {name: statistics.median(finite_figures(one.get(name, 0.0) for one in broken)) for name in names}
        seconds = finite_figures([one["all"] for one in broken] if local else _seconds(_of(rounds[0], "train")))
        return _Times(parts, min(seconds), max(seconds), comparable=len(rounds) > 1 or not local)

    def speed(self, first: _Times) -> str:
        """Speed as a multiple of the first scheme's, where their ranges are apart."""
        if self is not first and not (self.comparable and first.comparable):
            return ""
        if self is not first and self.least <= first.most and first.least <= self.most:
            return "overlap"
        return _cell(_over(first.parts["all"], self.parts["all"]), ".2f")


def _seconds(train: Events) -> list[float]:
    """Seconds of the iterations after the warm-up."""
    return [event.number("seconds_per_iteration", math.nan) for event in (train[_WARM:] or train)]


def _range(least: float, most: float) -> str:
    return "" if math.isnan(least) else f"{least:.4f} to {most:.4f}"


_SINGLE_NOTE = " With one run of each scheme, the range is that of its iterations; runs may differ by more."
_LOCAL_NOTE = """

Links inside one machine are not shaped, so differences are the cost of coding, not of the network. `tools/netlab.py`
trains over links of the rates that you ask for."""


def _time_note(first: str, rounds: int, local: bool) -> str:
    """A description of the times and of what they cannot show."""
    measured = f"rounds (up to {rounds}), in which the schemes took turns" if local else "iterations"
    return (
        f"\n\nTimes are medians of {measured}, and their range. Where a scheme's range and that of {first} overlap, "
        f"neither is called faster.{'' if local else _SINGLE_NOTE} Each part is the slowest rank's, so that parts may "
        f"overlap; computing is what they leave of the time.{_LOCAL_NOTE if local else ''}"
    )


def _breakdown(found: Mapping[str, Sequence[Events]], local: bool) -> Report:
    times = {scheme: _Times.of(rounds, local) for scheme, rounds in found.items()}
    parts = {scheme: own.parts for scheme, own in times.items()}
    columns = ["compute", "coding", *dict.fromkeys(n for p in parts.values() for n in p if n.startswith("exposed"))]
    name, first = next(iter(times.items()))
    rows = []
    for scheme, own in times.items():
        cells = [_cell(own.parts.get(column, 0.0), ".4f") for column in columns]
        seconds = [_cell(own.parts["all"], ".4f"), _range(own.least, own.most)]
        rows.append([scheme, *seconds, *cells, own.speed(first)])
    head = ["scheme", "s / iteration", "least to most", *columns, f"times as fast as {name}"]
    note = _time_note(name, max(map(len, found.values())), local)

    def draw(axes: Any) -> None:
        left = [0.0] * len(parts)
        for number, column in enumerate(columns):
            widths = [0.0 if math.isnan(width := own.get(column, 0.0)) else width for own in parts.values()]
            # Other hatches where the colors begin anew.
            look = {"color": COLORS[number % len(COLORS)], "hatch": "//" if number >= len(COLORS) else ""}
            axes.barh(list(parts), widths, left=left, label=column, edgecolor="white", linewidth=0.5, **look)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for number, own in enumerate(times.values()):
            axes.plot([own.least, own.most], [number, number], color="black", linewidth=1, marker="|")
        axes.invert_yaxis()
        axes.set_xlabel("seconds an iteration")
        axes.figure.legend(loc="outside upper center", ncols=4, fontsize=7, frameon=False)

    return markdown_table(head, rows) + note, draw


def _evaluations(events: Events) -> tuple[dict[int, Record], dict[int, Record]]:
    """The evaluations on the way and at the end, by iteration: the latter are of other samples."""
    on_the_way: dict[int, Record] = {}
    at_the_end: dict[int, Record] = {}
    for event in _of(events, "validation"):
        if "lm_loss" in event:
            (at_the_end if of_final_draw(event) else on_the_way)[event.iteration()] = event
    return on_the_way, at_the_end


def _comparable(found: Mapping[str, Events]) -> tuple[str, dict[str, Record]]:
    """The last evaluations that all schemes have of the same samples, and where they are."""
    pairs = {scheme: _evaluations(events) for scheme, events in found.items()}
    # A scheme that has not been evaluated yet keeps nobody back.
    known = {scheme: pair for scheme, pair in pairs.items() if any(pair)}
    for kind, name in ((1, "at the end, iteration"), (0, "at iteration")):
        common = set.intersection(*(set(pair[kind]) for pair in known.values())) if known else set()
        if common:
            last = max(common)
            return f"{name} {last}", {scheme: pair[kind][last] for scheme, pair in known.items()}
    return "", {}


def _perplexity(found: Mapping[str, Events]) -> Report:
    rows = []
    where, compared = _comparable(found)
    for scheme, events in found.items():
        train = _of(events, "train")
        figures = ["", ""]
        if scheme in compared:
            event = compared[scheme]
            figures = [_loss(event), f"{math.exp(min(event.number('lm_loss'), 20.0)):.2f}"]
        days = sum(event.number("seconds_per_iteration", math.nan) for event in train) / 86400
        rows.append([scheme, str(train[-1].iteration()), *figures, _cell(days, ".3g")])
    head = ["scheme", "iterations", f"validation loss {where}".rstrip(), "perplexity", "days"]

    def draw(axes: Any) -> None:
        for number, (scheme, events) in enumerate(found.items()):
            valid = _evaluations(events)[0].values()
            losses = [event.number("lm_loss") for event in valid]
            style = {**curve_style(number), "markersize": 4, "markerfacecolor": "white"}
            axes.plot([event.iteration() for event in valid], losses, **style, label=scheme)
        label_iterations(axes)
        axes.set_ylabel("validation loss, nats per token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)

    return markdown_table(head, rows), draw


_PROBED = ("cosine_sim", "error_avg", "acti_delta_avg")


def _orthogonality(found: Mapping[str, Events]) -> Report:
    rows, series = [], {}
    for scheme, events in found.items():
        probes = [event for event in _of(events, "orthogonality") if event.numbers("cosine_sim")]
        if not probes:
            continue
        cosines = [statistics.fmean(finite_figures(event.numbers("cosine_sim"))) for event in probes]
        every = {name: finite_figures(x for event in probes for x in event.numbers(name)) for name in _PROBED}
        series[scheme] = ([event.iteration() for event in probes], cosines)
        means = [f"{statistics.fmean(map(abs, every[name])):.2e}" for name in _PROBED[1:]]
        largest = max(map(abs, every["cosine_sim"]))
        rows.append([scheme, f"{statistics.fmean(finite_figures(cosines)):+.4f}", f"{largest:.4f}", *means])
    head = ["scheme", "mean cosine", "largest |cosine|", "mean |error average|", "mean |change average|"]

    def draw(axes: Any) -> None:
        for number, (scheme, (iterations, cosines)) in enumerate(series.items()):
            axes.plot(iterations, cosines, linewidth=1, color=COLORS[number % len(COLORS)], label=scheme)
        axes.axhline(0.0, color="black", linewidth=0.8)
        label_iterations(axes)
        axes.set(ylabel="cosine: error and change of the activation", ylim=(-1, 1))
        axes.grid(alpha=0.3)
        if series:
            axes.legend(frameon=False)

    return markdown_table(head, rows), draw


def _memory(found: Mapping[str, Events]) -> Report:
    peaks: dict[str, float] = {}
    for scheme, events in found.items():
        known = finite_figures(event.number("memory_bytes", math.nan) for event in _of(events, "train"))
        peaks[scheme] = max(known) / 1e6
    base = next(iter(peaks.values()))
    rows = [
        [scheme, _cell(peak, ".0f"), _cell(peak - base, "+.0f"), _cell(_over(peak, base), ".3f")]
        for scheme, peak in peaks.items()
    ]

    def draw(axes: Any) -> None:
        known = {scheme: peak for scheme, peak in peaks.items() if not math.isnan(peak)}
        axes.bar_label(axes.bar(list(known), list(known.values()), color=COLORS[0], width=0.6), fmt="%.0f")
        axes.set_ylabel("peak memory of a rank, MB")

    return markdown_table(["scheme", "peak MB", "above the first", "times the first"], rows), draw


_REPORTS: dict[str, Callable[[Mapping[str, Events]], Report]] = {
    "losses": _losses,
    "perplexity": _perplexity,
    "orthogonality": _orthogonality,
    "memory": _memory,
}
