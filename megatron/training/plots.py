"""Plots of a run, drawn from its JSON-lines file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.base.figures import COLORS, label_iterations, new_figure, picture_format, save_figure
from megatron.training.records import Record, read_records


def plot_loss_curve(
    jsonl_paths: Sequence[str | Path],
    out_png: str | Path,
    *,
    reference_lines: Mapping[str, float] | None = None,
    loss: str = "lm_loss",
    title: str = "Loss",
) -> Path:
    """Plot training and validation loss over iterations; a single run also has a token axis.

    Args:
        jsonl_paths: file of each run, as ``--log-json-file`` writes them.
        out_png: the picture, which is written atomically.
        reference_lines: label -> loss in nats per token, drawn as dashed horizontals (such as the unigram entropy).
        loss: key of the loss in the events.

    Returns:
        The picture's path.

    Raises:
        UserError: when matplotlib is missing, the picture's file extension is unknown, or a file has no training
            events.
    """
    picture_format(Path(out_png))
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    runs = [_LossCurves(Path(path), loss) for path in jsonl_paths]
    # Runs differ by their file names, or by their folders' names if file names repeat.
    if len(runs) == 1:
        labels = [""]
    else:
        names = [run.path.stem for run in runs]
        if len(set(names)) < len(names):
            names = [run.path.parent.name for run in runs]
        labels = [f"{name}, " for name in names]
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        color = COLORS[i % len(COLORS)]
        # Color distinguishes several runs; a single run can use a second color for held-out losses.
        run.draw(axes, label, color, color if len(runs) > 1 else COLORS[1])
    for (label, value), style in zip((reference_lines or {}).items(), ("--", ":", "-.") * 9, strict=False):
        axes.axhline(value, linestyle=style, linewidth=1.2, color="#555555", label=f"{label}: {value:.2f}")
    axes.set_title(title)
    label_iterations(axes)
    axes.set_ylabel("nats per token")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    if len(runs) == 1 and runs[0].tokens_per_iteration:
        longest = axes.get_xlim()[1] * runs[0].tokens_per_iteration
        units = ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "))
        unit, name = next(((size, name) for size, name in units if longest >= size), (1.0, ""))
        scale = runs[0].tokens_per_iteration / unit
        top = axes.secondary_xaxis("top", functions=(lambda x: x * scale, lambda x: x / scale))
        top.set_xlabel(f"{name}tokens")
    return save_figure(figure, Path(out_png))


class _LossCurves:
    """The curves of one JSON-lines file."""

    def __init__(self, path: Path, loss: str) -> None:
        try:
            events = read_records(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        self.path = path
        self.train = _points(events, "train", loss)
        # The final evaluation draws other samples than earlier evaluations, so it is no point of their curve.
        self.validation = _points([e for e in events if not of_final_draw(e)], "validation", loss)
        self.final = _points([e for e in events if of_final_draw(e)], "validation", loss)
        self.test = _points(events, "test", loss)
        if not self.train:
            raise UserError(f"{path}: holds no training events with {loss!r}: was it written by --log-json-file?")
        last = next(e for e in reversed(events) if e.get("kind") == "train")
        tokens = last.number("consumed_tokens", 0.0)
        # If batches or sequences grow, tokens are not proportional to iterations, so there is no second axis.
        sizes = {
            (e.number("global_batch_size", 0.0), e.number("curriculum_seqlen", 0.0))
            for e in events
            if e.get("kind") == "train"
        }
        self.tokens_per_iteration = tokens / max(last.iteration(), 1) if tokens > 0 and len(sizes) == 1 else 0.0

    def draw(self, axes: Any, label: str, color: str, held_out_color: str) -> None:
        axes.plot(*zip(*self.train, strict=True), color=color, alpha=0.75, label=f"{label}training")
        hollow = {"color": held_out_color, "markerfacecolor": "white"}
        if self.validation:
            x, y = zip(*self.validation, strict=True)
            axes.plot(x, y, "o-", markersize=4.5, **hollow, label=f"{label}validation: {y[-1]:.2f}")
        if self.final:
            x, y = zip(*self.final, strict=True)
            axes.plot(x, y, "D", markersize=5, **hollow, label=f"{label}validation at the end: {y[-1]:.2f}")
        if self.test:
            x, y = zip(*self.test, strict=True)
            axes.plot(x, y, "*", markersize=10, **hollow, label=f"{label}test: {y[-1]:.2f}")


def of_final_draw(event: Record) -> bool:
    """Whether an evaluation took place at the end of training, on the first samples of its set instead of the next."""
    return event.get("samples") is not None


def _points(events: Sequence[Record], kind: str, loss: str) -> list[tuple[int, float]]:
    """Points of a loss; a value that is not finite becomes nan, which leaves a gap in the curve."""
    return [(e.iteration(), e.number(loss)) for e in events if e.get("kind") == kind and loss in e]
