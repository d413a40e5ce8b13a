"""Flags of other systems: sections that are translated into ours once everything was read, and then forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.option import field_options
from megatron.base.words import Note
from megatron.config.shortcuts import Explicit

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The flags of another system.

    section: its name; it is no section of a run.
    config: a dataclass of `option` fields.
    translate: takes the values that were given explicitly (dotted field -> value), the section's among them, and
        adds what they mean; it reports with the note and raises UserError for what cannot be meant.
    """

    section: str
    config: type
    translate: Callable[[Explicit, Note], None]


class Given(Generic[T]):
    """The values of a dialect's section, which remembers what was looked at.

    A flag that was given and that nothing looked at has no effect: `unread` names it. That way the rule cannot
    part from the translation.
    """

    def __init__(self, section: str, config: type[T], explicit: Explicit) -> None:
        self.names = [path.partition(".")[2] for path in explicit if path.partition(".")[0] == section]
        self._values: Any = config(**{name: explicit[f"{section}.{name}"] for name in self.names})
        check_fields(section, self._values)
        self._options = {field.name: field for field in field_options(section, config)}
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._values, name)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def unread(self) -> list[str]:
        """Names of what was given and not looked at, but for flags that never have an effect and say so."""
        return [name for name in self.names if name not in self._read and not self._options[name].option.no_effect]


def flag(name: str) -> str:
    """A field's flag."""
    return "--" + name.replace("_", "-")


def settle(explicit: Explicit, by: str, path: str, value: Any, where: str) -> None:
    """Set the field `path` to what another system's flag, the field `by`, means.

    What a higher source says about either wins. Raises UserError, starting with `where`, when one source says two
    things.
    """
    level, before = explicit.levels.get(by, 0), explicit.levels.get(path)
    if before is None or before < level:
        explicit[path] = value
        explicit.levels[path] = level
    elif before == level and explicit[path] != value:
        ours = flag(path.partition(".")[2])
        shown = "" if isinstance(explicit[path], bool) else f" {explicit[path]}"
        raise UserError(f"{where} and {ours}{shown} contradict each other; give only one of them")
