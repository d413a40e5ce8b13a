"""Reading plain JSON: no duplicate names, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.config.errors import UserError
from megatron.config.settings_file import read_settings


def read_json(path: str | Path, where: str) -> dict[str, Any]:
    """The mapping that the file holds. Raises UserError starting with `where`, which names the file."""
    text = read_settings(path, where, "JSON")
    try:
        content = json.loads(text, object_pairs_hook=_without_doubles)
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
