"""The rows of a section of the GPU benchmark, in a file that survives whatever ends the section."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.tables import Cells, Column


@dataclass(frozen=True)
class Setting:
    """The setting of every section.

    Args:
        device: cuda, or cpu with toy sizes, which only show that everything runs.
        out: folder of the results.
        copy_bytes_per_s: bandwidth of a large copy, reads and writes together.
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
        """Whether sizes are such that a CPU computes them in seconds."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Claim:
    """A claim about some rows, and their values.

    Args:
        what: the claim, in words.
        least: smallest value at which the claim holds.
        values: measured values.
    """

    what: str
    least: float
    values: tuple[float, ...]

    @property
    def met(self) -> int:
        """Number of the values that meet the claim."""
        return sum(value >= self.least for value in self.values)


class SectionLog:
    """The log of a section, one line of JSON for each event."""

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
        """Records a row that cannot be measured; the section continues with others."""
        self._write({"failed": key, "why": why})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Section(Protocol):
    """The interface of a section's module."""

    TITLE: str
    NOTE: str
    """Explanation of the table's columns."""
    COLUMNS: Sequence[Column]
    LIMIT_SECONDS: float
    """Time limit of the whole section."""
    PATIENCE_SECONDS: float
    """Longest silence of a section before it counts as hung."""

    def keys(self, setting: Setting) -> list[str]:
        """The rows, the most important ones first."""
        ...

    def measure(self, setting: Setting, wanted: Sequence[str], report: SectionLog) -> None:
        """Measures some of the rows."""
        ...

    def tidy(self) -> None:
        """Removes what a killed process of the section leaves behind."""
        ...

    def claims(self, rows: Mapping[str, Cells]) -> list[Claim]:
        """Claims about the rows."""
        ...


@dataclass
class Book:
    """The content of a section's file.

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


def setting_text(setting: Setting) -> str:
    """The setting as JSON, for a section's process."""
    return json.dumps({**asdict(setting), "out": str(setting.out)})


def setting_of(text: str) -> Setting:
    """The setting of a text of ``setting_text``."""
    values = json.loads(text)
    return Setting(**{**values, "out": Path(values["out"])})
