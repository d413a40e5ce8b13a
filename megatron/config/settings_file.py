"""Reading the text of a file of settings, whatever the path names: errors in one line."""

from __future__ import annotations

from pathlib import Path

from megatron.config.errors import UserError
from megatron.config.regular import read_regular

_LARGEST = 1 << 20
"""Bytes of a file. All flags together are a hundredth of that, and reading YAML takes seconds a megabyte."""


def read_settings(path: str | Path, where: str, kind: str) -> str:
    """The text of a file.

    Args:
        path: of it.
        where: starts the message of an error, and names the file.
        kind: what it should be: "YAML" or "JSON".

    Raises:
        UserError: when it cannot be read, is large, or is no text.
    """
    try:
        data = read_regular(path, _LARGEST + 1)
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}); give a {kind} file") from None
    except ValueError as error:  # a null character in the path
        raise UserError(f"{where!r}: cannot be read ({error}); give a {kind} file") from None
    if len(data) > _LARGEST:
        raise UserError(f"{where}: is larger than {_LARGEST:,} bytes; give a {kind} file of settings")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where}: is not UTF-8 text; give a {kind} file") from None
