"""Small files for the cleaning tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.data.lines import lines, writing

ENGLISH = (
    "The old house by the river had been empty for many years when the new family came. They painted the door, "
    "mended the roof and planted apple trees, and in the evening they sat outside and listened to the water. "
)
GERMAN = (
    "Das alte Haus am Fluss hatte viele Jahre leer gestanden, als die neue Familie kam. Sie strichen die Tür, "
    "flickten das Dach und pflanzten Apfelbäume, und am Abend saßen sie draußen und hörten dem Wasser zu. "
)
RUN = "who painted the old green door of the house beside the slow river"
FILL = "Nothing of this has been asked about. " * 12


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a file of JSON lines and return its name."""
    with writing(path) as line:
        for row in rows:
            line(json.dumps(row).encode())
    return str(path)


def read(path: Path | str) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in lines(path)]


Refusal = Callable[[Any, list[str]], str]
"""Calls a tool with flags and returns its error line."""
