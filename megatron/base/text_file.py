r"""Text files, which must be UTF-8, and the JSON in their lines.

Lines end at "\n" alone, or at "\r\n" as Windows writes it. Other characters that some programs end lines at (U+2028,
U+0085, "\x0b" to "\x1e", a "\r" alone) are part of the text, as vocabularies have entries of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError

_MOST_DIGITS = 18
"""Characters of an integer that is read as one; Python takes the square of the time for more, and then refuses."""


def read_utf8(path: str | Path, flag: str) -> str:
    """Reads a text file, without the byte order mark that some editors begin it with.

    Args:
        path: path of the file.
        flag: flag that names the file, for the message.

    Raises:
        UserError: when it cannot be read; naming the line that is no UTF-8.
    """
    try:
        contents = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from error
    try:
        return contents.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = contents.count(b"\n", 0, error.start) + 1
        raise UserError(f"{flag} {path}, line {line}: is no UTF-8 text") from error


def read_lines(path: str | Path, flag: str) -> list[str]:
    """Reads the lines of a text file, without their ends. Arguments and errors as of ``read_utf8``."""
    lines = read_utf8(path, flag).split("\n")
    return lines if lines[-1] else lines[:-1]


@dataclass(frozen=True)
class Numeral:
    """A number of JSON that Python would write in another way, or not at all.

    Args:
        text: the number as it is written.
    """

    text: str

    def __float__(self) -> float:
        return float(self.text)


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; numbers that Python would write in another way are ``Numeral``.

    So a value goes through a program unchanged, and long integers cost no more than other text of their length.

    Raises:
        ValueError: when it is no JSON.
        RecursionError: when it is nested too deeply.
    """
    return json.loads(text, parse_int=_integer, parse_float=_fraction)


def _integer(text: str) -> int | Numeral:
    return int(text) if len(text) <= _MOST_DIGITS and text != "-0" else Numeral(text)


def _fraction(text: str) -> float | Numeral:
    value = float(text)
    return value if repr(value) == text else Numeral(text)
