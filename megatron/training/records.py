"""Reads back the JSON lines of a run (``--log-json-file``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError


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
