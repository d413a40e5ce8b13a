"""Reading and writing plain YAML: no tags, no duplicate keys, errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron.config.errors import UserError
from megatron.config.settings_file import read_settings


class _PlainLoader(yaml.SafeLoader):
    """The safe loader, refusing a key that is given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(getattr(key_node, "value", ""))
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _BlockDumper(yaml.SafeDumper):
    """The safe dumper without anchors: equal lists are written out, not referred to."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that the file holds, empty for an empty file. Raises UserError naming the file."""
    return parse_yaml(read_settings(path, str(path), "YAML"), str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping that the text holds, empty for an empty text. Raises UserError starting with `where`."""
    try:
        content = yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: is not valid YAML ({_one_line(error)}); correct the file") from None
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply; give sections of names and values") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # What the loader's own constructors let through: numbers of 5,000 digits, dates that are none, odd tags.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where}: holds a value that cannot be read ({reason}); correct the file") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected names and values, not a {type(content).__name__}")
    return content


def dump_yaml(content: dict[str, Any]) -> str:
    """YAML text of plain values, one block a section, keys in the given order."""
    blocks = [
        yaml.dump({name: section}, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=2**31)
        for name, section in content.items()
    ]
    return "\n".join(blocks)


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        return f"{place}{error.problem or error.context or 'syntax error'}"
    return " ".join(str(error).split())
