r"""UTF-8 text files, and JSON in their lines.

Lines end only at "\n", or "\r\n" as on Windows. Other characters that some programs treat as line ends (U+2028, U+0085,
"\x0b" to "\x1e", a lone "\r") are part of the text, since vocabularies have entries with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError

_MAX_DIGITS = 18
"""Maximum characters of an integer to parse as int; Python's conversion takes quadratic time, and has a limit."""


def read_utf8(path: str | Path, flag: str) -> str:
    """Read a text file, without the byte order mark that some editors add.

    Raises:
        UserError: when it cannot be read; the message names ``flag``, the file, and the line that is not UTF-8.
    """
    try:
        contents = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from error
    try:
        return contents.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = contents.count(b"\n", 0, error.start) + 1
        raise UserError(f"{flag} {path}, line {line}: is not UTF-8 text") from error


def read_lines(path: str | Path, flag: str) -> list[str]:
    """Read the lines of a text file, without line ends. Arguments and errors as for ``read_utf8``."""
    lines = read_utf8(path, flag).split("\n")
    return lines if lines[-1] else lines[:-1]


@dataclass(frozen=True)
class Numeral:
    """A JSON number as written, if Python would write it differently or cannot represent it."""

    text: str

    def __float__(self) -> float:
        return float(self.text)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; numbers that Python would write differently become ``Numeral``.

    Values thus pass through a program unchanged, and long integers cost no more than other text of their length.

    Raises:
        ValueError: when it is not valid JSON.
        RecursionError: when it is nested too deeply.
    """
    return json.loads(text, parse_int=_integer, parse_float=_fraction)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _integer(text: str) -> int | Numeral:
    return int(text) if len(text) <= _MAX_DIGITS and text != "-0" else Numeral(text)


def _fraction(text: str) -> float | Numeral:
    value = float(text)
    return value if repr(value) == text else Numeral(text)
