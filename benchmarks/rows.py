"""Rows of a benchmark in a file that survives its process: the same command continues with the missing rows.

The file has a line of JSON for each event. The first line names the hardware, versions and sources that the rows depend
on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Cells


class RowLog:
    """Writer of the events of rows to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:  # a killed process left half a line
                file.write("\n")

    def begin(self, key: str) -> None:
        """Record which row is being measured; repeated, it is a sign of life."""
        self._write({"begin": key})

    def row(self, key: str, **cells: Any) -> None:
        """Record a finished row."""
        self._write({"row": key, "cells": cells})

    def failed(self, key: str, reason: str) -> None:
        """Record a row that cannot be measured; others follow."""
        self._write({"failed": key, "reason": reason})

    def _write(self, event: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")


@dataclass
class RowFile:
    """Contents of a file of rows.

    Args:
        rows: finished rows by key.
        failures: reasons of this call's missing rows by key.
        current: key of the row that is being measured.
        line_count: number of lines read.
    """

    rows: dict[str, Cells] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    current: str | None = None
    line_count: int = 0

    def read(self, path: Path) -> RowFile:
        """Read the lines since the last call, without an unfinished last line."""
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for text in lines[self.line_count :]:
            self.line_count += 1
            try:
                event = json.loads(text)
            except ValueError:
                continue
            if "begin" in event:
                self.current = event["begin"]
            elif "row" in event:
                self.rows[event["row"]] = event["cells"]
                self.failures.pop(event["row"], None)
            elif "failed" in event:
                self.failures[event["failed"]] = event["reason"]
        return self


def earlier_rows(path: Path, dependencies: Mapping[str, str]) -> RowFile:
    """Return the finished rows of earlier calls with the same hardware, versions and sources."""
    if not path.exists() or not path.read_text().startswith(_first_line(dependencies) + "\n"):
        return RowFile()
    return RowFile(rows=RowFile().read(path).rows)


def _first_line(dependencies: Mapping[str, str]) -> str:
    return json.dumps({"depends_on": dict(dependencies)})


def open_rows(path: Path, dependencies: Mapping[str, str], again: bool) -> RowFile:
    """Read the earlier rows, and rewrite the file with only these; rows of other sources move to ``.old``.

    With ``again``, all rows are measured again.
    """
    file = RowFile() if again else earlier_rows(path, dependencies)
    if path.exists() and not file.rows:
        path.replace(path.with_name(path.name + ".old"))
    lines = [
        _first_line(dependencies),
        *(json.dumps({"row": key, "cells": cells}) for key, cells in file.rows.items()),
    ]
    path.write_text("\n".join(lines) + "\n")
    file.line_count = len(lines)
    return file
