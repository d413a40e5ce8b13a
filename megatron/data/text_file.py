"""Text files, which must be UTF-8."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import UserError


def read_utf8(path: str, flag: str) -> str:
    """Reads a text file.

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
        return contents.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = contents.count(b"\n", 0, error.start) + 1
        raise UserError(f"{flag} {path}, line {line}: is no UTF-8 text") from error
