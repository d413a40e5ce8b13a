"""Tables of measurements, and their JSON record with the machine, the versions and the date."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import REPO
from megatron.base.atomic import atomic_write
from megatron.base.markdown import markdown_head, markdown_row

Cells = Mapping[str, Any]
"""A measurement: its figures by name."""

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        title: title of the column.
        value: name of the figure, or a function of the measurement.
        form: format of the value.
    """

    title: str
    value: str | Callable[[Cells], Any]
    form: str = ""

    def value_of(self, cells: Cells) -> Any:
        """Return the value of a measurement, or None."""
        return cells.get(self.value) if isinstance(self.value, str) else self.value(cells)

    def text(self, cells: Cells) -> str:
        """Return the text of a cell; empty without a value."""
        value = self.value_of(cells)
        return "" if value is None else format(value, self.form)


class Table:
    """A table with a line for each measurement, which can be shown line by line."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def head(self) -> str:
        """Return the first two lines."""
        return markdown_head([column.title for column in self.columns])

    def line(self, cells: Cells) -> str:
        return markdown_row(column.text(cells) for column in self.columns)

    def text(self, rows: Iterable[Cells]) -> str:
        return "\n".join([self.head(), *map(self.line, rows)])

    def without_empty_columns(self, rows: Iterable[Cells]) -> Table:
        """Return the table of the columns in which some measurement has a value."""
        rows = list(rows)
        return Table(*(column for column in self.columns if any(column.value_of(cells) is not None for cells in rows)))


def header(device: str) -> dict[str, object]:
    """Hardware, versions, sources and date of a measurement on a device of this name."""
    import torch  # not at the top: processes that only record rows do not need it

    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    changes = _output_of("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "device": device,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": _output_of(*_DRIVER).split("\n")[0] or "none",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit + (" and changes" if changes else "") if commit else "not a git tree",
        "sources": digest_of_sources(),
    }


def device_name(device: str) -> str:
    """Name of a device of this machine."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


def write_record(path: Path, record_header: Mapping[str, object], **content: Any) -> None:
    """Write figures below their header, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write((json.dumps({"header": record_header, **content}, indent=1) + "\n").encode())


def digest_of_sources() -> str:
    """Return a digest of the sources of the package and of the benchmarks."""
    digest = hashlib.sha256()
    for folder in ("megatron", "benchmarks"):
        for path in sorted((REPO / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cpp", ".h", ".inl") and path.is_file():
                digest.update(path.relative_to(REPO).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _output_of(*words: str) -> str:
    """Return the output of a command; empty when it is missing or fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, cwd=REPO, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
