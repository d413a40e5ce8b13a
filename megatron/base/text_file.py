r"""Text files, which must be UTF-8, and the JSON in their lines.

Lines end at "\n" alone, or at "\r\n" as Windows writes it. Other characters that some programs end lines at (U+2028,
U+0085, "\x0b" to "\x1e", a "\r" alone) are part of the text, as vocabularies have entries of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError


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


def parse_json(text: str) -> Any:
    """Parses JSON; whole numbers of more digits than Python converts become floats.

    Raises:
        ValueError: when it is no JSON.
        RecursionError: when it is nested too deeply.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=float)
