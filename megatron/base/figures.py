"""Matplotlib figures: colors, formats, and atomic writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.base.atomic import atomic_write, check_writable
from megatron.base.errors import UserError

ENDINGS = ("png", "pdf", "svg", "svgz", "eps", "ps", "jpg", "jpeg", "tif", "tiff", "webp")
"""File extensions of plots."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that color-blind readers can tell apart (Okabe and Ito)."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_TIMES = (("days", 24.0), ("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure with a size in inches, without global state or a display.

    Raises:
        UserError: when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("drawing needs the matplotlib package: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def curve_style(number: int) -> dict[str, Any]:
    """Color, dashes and marker of a numbered curve; 28 curves can be distinguished."""
    # Seven and four have no common factor, so the pairs repeat after 28, and neighbors differ in color and dashes.
    color, dashes, marker = COLORS[number % 7], _DASHES[number % 4], MARKERS[number % 7]
    return {"color": color, "linestyle": dashes, "marker": marker}


def label_iterations(axes: Any) -> None:
    """Label the horizontal axis as iterations, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))


def time_unit(hours: float) -> tuple[str, float]:
    """The largest time unit in which a duration exceeds 2 (else seconds), and the unit's length in hours."""
    return next(((name, length) for name, length in _TIMES if hours > 2 * length), _TIMES[-1])


def picture_format(path: Path) -> str:
    """Return the format for a picture's file extension (png without an extension); call it before drawing.

    Raises:
        UserError: when the extension is unknown.
    """
    ending = path.suffix.lstrip(".").lower() or "png"
    if ending not in ENDINGS:
        raise UserError(f"{path}: not a picture format; use {', '.join(f'.{suffix}' for suffix in ENDINGS)}")
    return ending


def check_picture(path: str | Path, flag: str) -> None:
    """Check that a picture can be drawn to a file, before its content is computed.

    Raises:
        UserError: when the extension is unknown, the file cannot be written, or matplotlib is missing; the message
            starts with ``flag``.
    """
    try:
        picture_format(Path(path))
        new_figure(1.0, 1.0)
    except UserError as error:
        raise UserError(f"{flag} {error}") from error
    check_writable(path, flag)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure atomically, in the format of the file extension.

    Raises:
        UserError: when the extension is unknown, or the file cannot be written.
    """
    from matplotlib import rc_context

    file_format = picture_format(path)
    try:
        # Text of an SVG stays text, which can be searched and is smaller than outlines.
        with rc_context({"svg.fonttype": "none"}), atomic_write(path) as stream:
            figure.savefig(stream, format=file_format)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; name a file elsewhere") from error
    return path
