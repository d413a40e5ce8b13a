"""Reading plain JSON: no duplicate names, errors in one line."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from megatron.config.errors import UserError

_LARGEST = 1 << 20


def read_json(path: str | Path, where: str) -> dict[str, Any]:
    """The mapping that the file holds. Raises UserError starting with `where`, which names the file."""
    try:
        # A pipe or a device may never end; opened like this, none makes anyone wait.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise UserError(f"{where}: is no plain file; give a JSON file")
            data = stream.read(_LARGEST + 1)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}); check the path") from None
    except ValueError as error:  # a null character in the path
        raise UserError(f"{where!r}: cannot be read ({error}); check the path") from None
    if len(data) > _LARGEST:
        raise UserError(f"{where}: is larger than {_LARGEST:,} bytes; give a JSON file of settings")
    try:
        content = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_without_doubles)
    except UnicodeDecodeError:
        raise UserError(f"{where}: is not UTF-8 text; give a JSON file") from None
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply; correct the file") from None
    except ValueError as error:
        raise UserError(f"{where}: is not valid JSON ({str(error).splitlines()[0]}); correct the file") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected names and values, not a {type(content).__name__}")
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"{name!r} is given twice")
        content[name] = value
    return content
