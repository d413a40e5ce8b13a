"""What a section of the GPU benchmark has measured: rows in a file that survives whatever ends the section."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

Cells = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What every section is told.

    Args:
        device: cuda, or cpu with toy sizes that show that everything runs.
        out: folder of the results.
        copy_bytes_per_s: read and written by a large copy.
        peak_flops: peak of the device's matrix products in bf16, FLOP/s.
        memory_bytes: memory of the device.
    """

    device: str
    out: Path
    copy_bytes_per_s: float = 0.0
    peak_flops: float = 0.0
    memory_bytes: float = 0.0

    @property
    def toy(self) -> bool:
        """Sizes that a CPU computes in seconds."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Claim:
    """What is wanted of some rows, and what they show.

    Args:
        what: the claim, in words.
        least: smallest value at which the claim holds.
        values: measured.
    """

    what: str
    least: float
    values: tuple[float, ...]

    @property
    def met(self) -> int:
        """How many of them are as wanted."""
        return sum(value >= self.least for value in self.values)


@dataclass(frozen=True)
class Column:
    """A column of a section's table: its title, the cell it shows, and the format of its numbers."""

    title: str
    key: str
    form: str = ""

    def text(self, cells: Mapping[str, Any]) -> str:
        """A cell as the table shows it; nothing where there is none."""
        value = cells.get(self.key)
        return "" if value is None else format(value, self.form)


class SectionLog:
    """Where a section notes what it does, one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:  # a kill cut it short
                file.write("\n")

    def begin(self, key: str) -> None:
        """What is measured from now on."""
        self._write({"begin": key})

    def row(self, key: str, **cells: Any) -> None:
        """A row is finished."""
        self._write({"row": key, "cells": cells})

    def failed(self, key: str, why: str) -> None:
        """A row cannot be had; goes on with others."""
        self._write({"failed": key, "why": why})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Section(Protocol):
    """What a module of a section holds."""

    TITLE: str
    NOTE: str
    """Explanation of the table's columns."""
    COLUMNS: Sequence[Column]
    LIMIT_SECONDS: float
    """Time limit of the whole section."""
    PATIENCE_SECONDS: float
    """Between two signs of life, before it counts as hung."""

    def keys(self, setting: Setting) -> list[str]:
        """The rows, the most important ones first."""
        ...

    def measure(self, setting: Setting, wanted: Sequence[str], report: SectionLog) -> None:
        """Measures some of them."""
        ...

    def tidy(self) -> None:
        """Removes what a killed process of it leaves behind."""
        ...

    def claims(self, rows: Mapping[str, Cells]) -> list[Claim]:
        """What is wanted of the rows that there are."""
        ...


@dataclass
class Book:
    """What the file of a section holds.

    Args:
        rows: finished rows, by their keys.
        failures: why others are not, of this call.
        current: what is being measured.
        lines: lines read so far.
    """

    rows: dict[str, Cells] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    current: str | None = None
    lines: int = 0

    def read(self, path: Path) -> Book:
        """Takes in what was written since the last call. A line that a kill cut short is none."""
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
        again: keep none.
    """
    book = Book() if again else kept(path, made_by)
    if path.exists() and not book.rows:
        path.replace(path.with_name(path.name + ".old"))
    # Written anew, so that failures and what a kill cut short are gone.
    lines = [_first(made_by), *(json.dumps({"row": key, "cells": cells}) for key, cells in book.rows.items())]
    path.write_text("\n".join(lines) + "\n")
    book.lines = len(lines)
    return book


def setting_text(setting: Setting) -> str:
    """The setting as JSON, for a section's process."""
    return json.dumps({**asdict(setting), "out": str(setting.out)})


def setting_of(text: str) -> Setting:
    """What ``setting_text`` wrote."""
    values = json.loads(text)
    return Setting(**{**values, "out": Path(values["out"])})
