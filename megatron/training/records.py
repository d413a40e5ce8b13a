"""Events read from a run's JSON-lines file (``--log-json-file``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.base.values import Values


class Record(Values):
    """An event of a JSON-lines file, with values checked on access.

    Args:
        values: values of the event.
        location: file and line, for messages.
    """

    def __init__(self, values: Mapping[str, Any], location: str) -> None:
        super().__init__(values, location, "correct or delete the line")

    def iteration(self, default: int | None = None) -> int:
        """The iteration of the event; the default if it is missing.

        Raises:
            UserError: when it is not a whole number, or missing without a default.
        """
        return self.integer("iteration", default, minimum=None, maximum=None)

    def number(
        self, name: str, default: float | None = None, *, minimum: float | None = None, maximum: float | None = None
    ) -> float:
        """A number: nan for null, which stands for a value that is not finite; the default if it is missing."""
        value = self.get(name, 0)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return math.nan
        number = super().number(name, default, minimum=minimum, maximum=maximum)
        return self.get(name, number)  # a count stays a whole number

    def numbers(self, name: str) -> list[float]:
        """A list of figures, nan for nulls.

        Raises:
            UserError: when it is not a list of figures.
        """
        return [Record({name: figure}, self.location).number(name) for figure in self.listed(name)]

    def groups(self, name: str) -> dict[str, Record]:
        """Figures by name, such as those of each communication point.

        Raises:
            UserError: when they are not figures by name.
        """
        groups = Record(self.table(name), f"{self.location}: {name}")
        return {key: Record(groups.table(key), f"{groups.location} {key}") for key in groups}


def read_records(path: str | Path) -> list[Record]:
    """Read the events of a JSON-lines file, without those voided by a ``resume`` event.

    A line that is not a JSON object (the run was killed while writing it) is skipped.

    Raises:
        UserError: when the iterations around a ``resume`` event are not numbers.
    """
    records: list[Record] = []
    # An editor may have put a byte order mark before the first line.
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # also numbers and nesting that Python does not read
                continue
            if not isinstance(event, dict):
                continue
            record = Record(event, f"{path}:{number}")
            if record.get("kind") == "resume":
                start = record.iteration(0)
                records = [earlier for earlier in records if earlier.iteration(0) <= start]
            records.append(record)
    return records


def finite_figures(figures: Iterable[float]) -> list[float]:
    """The finite values among some figures; a single nan if there are none."""
    return [figure for figure in figures if math.isfinite(figure)] or [math.nan]
