"""Places for figures: the console, a text file, a JSON-lines file, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron.config.errors import UserError
from megatron.config.logs import LoggingConfig


class Sink:
    """A place for figures. Each method does nothing unless a sink cares."""

    name = "a log"

    def line(self, text: str) -> None:
        """Whole lines of text."""

    def event(self, event: Mapping[str, Any]) -> None:
        """One record of named values."""

    def scalars(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        """Points of curves over an axis: `iterations`, `samples` or `tokens`."""

    def close(self) -> None:
        """Flush and release."""


class ConsoleSink(Sink):
    """Lines to the standard output, or through `write` (a progress bar's, so that the bar stays whole)."""

    name = "the standard output"

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write

    def line(self, text: str) -> None:
        if self._write is None:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            self._write(text)


class TextFileSink(Sink):
    """Lines appended to a file (`--log_txt_file`)."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self._file = _open_append(path, "--log_txt_file")

    def line(self, text: str) -> None:
        self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()


class JsonLinesSink(Sink):
    """One JSON object a line, appended to a file (`--log-json-file`).

    A run that goes on in an existing file first writes a `resume` event with the iteration it starts from:
    events of later iterations before it belong to work that was lost. `read_records` leaves them out. A number
    that is not finite is written as null, so that every line is strict JSON.
    """

    def __init__(self, path: str | Path, resume_iteration: int = 0) -> None:
        self.name = str(path)
        self._file = _open_append(path, "--log-json-file")
        if self._file.tell() > 0:
            self.event({"kind": "resume", "iteration": resume_iteration, "time": time.time()})

    def event(self, event: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(event), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
    """Curves for TensorBoard (`--tensorboard-dir`), with Megatron's tags.

    Curves over samples and tokens (`lm loss vs samples`) are runs of their own in subfolders `samples` and
    `tokens`. A resumed run has to discard the points of lost work, and TensorBoard discards by the step of a
    whole run: with steps of several kinds in one run it would discard nearly all of the curves over samples.

    Args:
        resume: position on each axis (`iterations`, `samples`, `tokens`) that the run goes on from.
    """

    def __init__(self, folder: str | Path, *, queue_size: int = 1000, resume: Mapping[str, int] | None = None) -> None:
        self.name = f"TensorBoard's events in {folder}"
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "--tensorboard-dir needs the tensorboard package: pip install tensorboard, or drop the flag"
            ) from error
        self._make_writer: Callable[..., Any] = SummaryWriter
        self._folder = Path(folder)
        self._queue_size = queue_size
        self._resume = dict(resume or {})
        self._writers: dict[str, Any] = {}
        # TensorBoard's threads print a trace of their own besides what the next call raises.
        self._hook_before = threading.excepthook
        threading.excepthook = self._on_thread_error
        self._writer("iterations")

    def _on_thread_error(self, failed: threading.ExceptHookArgs) -> None:
        if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__module__.startswith("tensorboard.")):
            self._hook_before(failed)

    def _writer(self, axis: str) -> Any:
        if axis not in self._writers:
            folder = self._folder if axis == "iterations" else self._folder / axis
            try:
                self._writers[axis] = self._make_writer(
                    str(folder), max_queue=self._queue_size, purge_step=self._resume.get(axis, 0) + 1
                )
            except OSError as error:
                raise UserError(f"--tensorboard-dir {folder}: cannot write there ({error.strerror})") from error
        return self._writers[axis]

    def scalars(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        writer = self._writer(axis)
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)

    def close(self) -> None:
        try:
            for writer in self._writers.values():
                writer.flush()  # raises what the writer's thread met
                writer.close()
        finally:
            threading.excepthook = self._hook_before


def open_sinks(
    config: LoggingConfig,
    *,
    resume: Mapping[str, int] | None = None,
    console: Callable[[str], None] | None = None,
) -> list[Sink]:
    """The sinks that the configuration asks for; the console always.

    Args:
        resume: position on each axis (`iterations`, `samples`, `tokens`) of the checkpoint that was loaded.
        console: writes lines instead of the standard output, such as `ProgressBar.write`.

    Raises UserError naming the flag when a file cannot be opened or a package is missing.
    """
    sinks: list[Sink] = [ConsoleSink(console)]
    if config.log_txt_file is not None:
        sinks.append(TextFileSink(config.log_txt_file))
    if config.log_json_file is not None:
        sinks.append(JsonLinesSink(config.log_json_file, (resume or {}).get("iterations", 0)))
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(config.tensorboard_dir, queue_size=config.tensorboard_queue_size, resume=resume))
    return sinks


class Record(dict[str, Any]):
    """An event that was read, which checks what it is asked for.

    Args:
        values: of the event.
        place: file and line, for messages.
    """

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        super().__init__(values)
        self.place = place

    def iteration(self, default: int | None = None) -> int:
        """Of the event; the default where it has none.

        Raises UserError when it is no whole number, or missing without a default.
        """
        value = self._value("iteration", default)
        if type(value) is not int:
            raise self._wrong(f"iteration {value!r} is not a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A figure: nan for null, which stands for what is not finite; the default where there is none.

        Raises UserError when it is no number, or missing without a default.
        """
        return self._number(name, self._value(name, default))

    def numbers(self, name: str) -> list[float]:
        """A list of figures, nan for nulls. Raises UserError when it is none."""
        values = self._value(name)
        if not isinstance(values, list):
            raise self._wrong(f"{name} {values!r} is not a list")
        return [self._number(name, value) for value in values]

    def groups(self, name: str) -> dict[str, Record]:
        """Figures by name, such as those of each communication point. Raises UserError when they are none."""
        values = self._value(name)
        if not isinstance(values, dict):
            raise self._wrong(f"{name} {values!r} is not a group")
        for key, figures in values.items():
            if not isinstance(figures, dict):
                raise self._wrong(f"{name} {key} {figures!r} is not a group")
        return {key: Record(figures, f"{self.place}: {name} {key}") for key, figures in values.items()}

    def _value(self, name: str, default: float | None = None) -> Any:
        value = self.get(name, default)
        if value is None and name not in self:
            raise self._wrong(f"no {name}")
        return value

    def _number(self, name: str, value: Any) -> float:
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(f"{name} {value!r} is not a number")
        try:
            return value if math.isfinite(value) else math.nan
        except OverflowError as error:
            raise self._wrong(f"{name} is too large a number") from error

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self.place}: {what}; correct or delete the line")


def read_records(path: str | Path) -> list[Record]:
    """The events of a JSON-lines file that count: what a `resume` event made void is left out.

    A line that is not a JSON object (the run was killed while writing it) is skipped.

    Raises UserError when the iterations around a `resume` event are none.
    """
    records: list[Record] = []
    for record in _json_objects(path):
        if record.get("kind") == "resume":
            start = record.iteration(0)
            records = [earlier for earlier in records if earlier.iteration(0) <= start]
        records.append(record)
    return records


def finite_figures(figures: Iterable[float]) -> list[float]:
    """Those of some records' figures that are finite; a nan where there is none."""
    return [figure for figure in figures if math.isfinite(figure)] or [math.nan]


def _json_objects(path: str | Path) -> Iterator[Record]:
    # An editor may have put a byte order mark before the first line.
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # numbers and nests that Python does not read, too
                continue
            if isinstance(event, dict):
                yield Record(event, f"{path}:{number}")


def _finite(value: Any) -> Any:
    """The same value with every float that JSON cannot say replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _open_append(path: str | Path, flag: str) -> IO[str]:
    """Open for appending, line-buffered, making the folder; a torn last line is closed first."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        return open(path, "a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot write there ({error.strerror})") from error
