"""Rows of a benchmark in a file that survives whatever ends it: the same command goes on with the missing ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tables import Cells


class RowLog:
    """The log of rows that are measured, one line of JSON for each event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:  # a kill cut it short
                file.write("\n")

    def begin(self, key: str) -> None:
        """Records which row is being measured."""
        self._write({"begin": key})

    def row(self, key: str, **cells: Any) -> None:
        """Records a finished row."""
        self._write({"row": key, "cells": cells})

    def failed(self, key: str, why: str) -> None:
        """Records a row that cannot be measured; others follow."""
        self._write({"failed": key, "why": why})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Book:
    """The content of such a file.

    Args:
        rows: finished rows, by their keys.
        failures: reasons why other rows are missing, of this call.
        current: key of the row that is being measured.
        lines: lines read so far.
    """

    rows: dict[str, Cells] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    current: str | None = None
    lines: int = 0

    def read(self, path: Path) -> Book:
        """Reads what was written since the last call, without a last line that a kill cut short."""
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for text in lines[self.lines :]:
            self.lines += 1
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if "begin" in line:
                self.current = line["begin"]
            elif "row" in line:
                self.rows[line["row"]] = line["cells"]
                self.failures.pop(line["row"], None)
            elif "failed" in line:
                self.failures[line["failed"]] = line["why"]
        return self


def kept(path: Path, made_by: Mapping[str, str]) -> Book:
    """The finished rows of earlier calls that were measured with the same hardware, torch and sources."""
    if not path.exists() or not path.read_text().startswith(_first(made_by) + "\n"):
        return Book()
    return Book(rows=Book().read(path).rows)


def _first(made_by: Mapping[str, str]) -> str:
    return json.dumps({"made_by": dict(made_by)})


def opened(path: Path, made_by: Mapping[str, str], again: bool) -> Book:
    """The rows that are kept, and a file to go on in; one whose rows are not is put aside.

    Args:
        path: path of the file.
        made_by: what rows must have been measured with.
        again: whether to keep no rows.
    """
    book = Book() if again else kept(path, made_by)
    if path.exists() and not book.rows:
        path.replace(path.with_name(path.name + ".old"))
    # Written anew, so that failures and what a kill cut short are gone.
    lines = [_first(made_by), *(json.dumps({"row": key, "cells": cells}) for key, cells in book.rows.items())]
    path.write_text("\n".join(lines) + "\n")
    book.lines = len(lines)
    return book
