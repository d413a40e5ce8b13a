"""Settings in YAML and JSON: read as plain names and values, with single-line errors; YAML is also written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from megatron.base.errors import UserError, first_line
from megatron.base.regular import read_regular

_MAX_BYTES = 1 << 20
"""Maximum size of a file. All flags together take a hundredth of that; YAML takes seconds per megabyte to read."""

_MAX_DIGITS = 400
"""Maximum digits of an integer: no real setting has more, and Python does not print integers of thousands of digits."""


def read_settings(path: str | Path, location: str, kind: str) -> str:
    """Read the text of a "YAML" or "JSON" document.

    Raises:
        UserError: when it cannot be read, is too large, or is not text; the message starts with ``location``.
    """
    try:
        data = read_regular(path, _MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{location}: cannot be read ({error.strerror}); give a {kind} file") from None
    except ValueError as error:  # a null character in the path
        raise UserError(f"{location!r}: cannot be read ({error}); give a {kind} file") from None
    if len(data) > _MAX_BYTES:
        raise UserError(f"{location}: is larger than {_MAX_BYTES:,} bytes; give a {kind} file of settings")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{location}: is not UTF-8 text; give a {kind} file") from None


def read_json(path: str | Path, location: str) -> dict[str, Any]:
    """Read a JSON file that holds a mapping.

    Raises:
        UserError: when it cannot be read or is not a mapping; the message starts with ``location``.
    """
    text = read_settings(path, location, "JSON")
    try:
        content = json.loads(text, object_pairs_hook=unique_names)
    except RecursionError:
        raise UserError(f"{location}: is nested too deeply; correct the file") from None
    except ValueError as error:
        raise UserError(f"{location}: is not valid JSON ({first_line(error)}); correct the file") from None
    if not isinstance(content, dict):
        raise UserError(f"{location}: expected names and values, not a {type(content).__name__}")
    return content


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise ValueError if a name occurs twice, of which other readers may take the first."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"{name!r} is given twice")
        content[name] = value
    return content


class _PlainLoader(yaml.SafeLoader):
    """The safe loader, with an error for duplicate keys of a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key = str(getattr(key_node, "value", ""))
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_DIGITS:
            problem = f"a number of {len(node.value):,} digits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        number: int = super().construct_yaml_int(node)
        return number


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)


class _BlockDumper(yaml.SafeDumper):
    """The safe dumper without anchors: shared lists are written out each time."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; an empty file gives an empty mapping.

    Raises:
        UserError: when it cannot be read or is not a mapping; the message names the file.
    """
    return parse_yaml(read_settings(path, str(path), "YAML"), str(path))


def parse_yaml(text: str, location: str) -> dict[str, Any]:
    """Parse YAML text that holds a mapping; empty text gives an empty mapping.

    Raises:
        UserError: when it is not a mapping; the message starts with ``location``.
    """
    try:
        content = yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError):
            mark = error.problem_mark
            line = f"line {mark.line + 1}: " if mark is not None else ""
            reason = f"{line}{error.problem or error.context or 'syntax error'}"
        raise UserError(f"{location}: is not valid YAML ({reason}); correct the file") from None
    except RecursionError:
        raise UserError(f"{location}: is nested too deeply; give sections of names and values") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # Errors of the loader's own constructors: numbers of 5,000 digits, invalid dates, odd tags.
        reason = first_line(error)
        raise UserError(f"{location}: holds a value that cannot be read ({reason}); correct the file") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{location}: expected names and values, not a {type(content).__name__}")
    return content


def dump_yaml(content: dict[str, Any]) -> str:
    """YAML text of plain values: a block per section, with keys in their original order."""
    blocks = [
        yaml.dump({name: section}, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=2**31)
        for name, section in content.items()
    ]
    return "\n".join(blocks)
