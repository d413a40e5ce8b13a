"""Rules by which flags of other systems, and our old ones, are translated into our flags.

One flag by itself: an `OldFlag` says, in words for fields of ours, what it means, or refuses. Those that mean something
only together: a `Rule` looks at all values once every source was read; a `Dialect` is a section of such flags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.option import field_options
from megatron.base.words import Note

SWITCH, VALUE, VALUES = "switch", "value", "values"
"""Number of words that follow a flag: none (or true or false), one, any number."""

GIVEN = "{value}"
"""In the tables, stands for the word that follows a flag."""


class Explicit(dict[str, Any]):
    """Values that were given explicitly: dotted field -> value.

    levels: dotted field -> number of the source that gave it; a higher one wins over a lower one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.levels: dict[str, int] = {}

    def add(self, values: Mapping[str, Any], level: int) -> None:
        """Adds the values of a source; sources come in ascending order of precedence."""
        self.update(values)
        self.levels.update(dict.fromkeys(values, level))


Rule = Callable[[Explicit, Note], None]
"""Translates given values that belong together, and notes what it did. Raises UserError for what is impossible."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of a flag and its words.

    sets: dotted field -> word, as if the field's own flag were given.
    note: a line to report; empty for none.
    rule: runs once everything was read.
    """

    sets: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    rule: Rule | None = None


@dataclass(frozen=True, kw_only=True)
class OldFlag(ABC):
    """A flag without a field of its own.

    name: without dashes.
    arity: SWITCH, VALUE or VALUES.
    help: --help hides a flag without it.
    """

    name: str
    arity: str = SWITCH
    help: str = ""

    @abstractmethod
    def meaning(self, words: Sequence[str]) -> Meaning:
        """Its meaning with the words that follow it. Raises UserError when that is refused."""


@dataclass(frozen=True, kw_only=True)
class Shortcut(OldFlag):
    """A flag that stands for others: an old name, or a switch that sets a field to a certain value.

    sets, note, rule: its meaning, where GIVEN is the word given to the flag.
    choices: the words that may be given, and what GIVEN is for each in `sets`; empty where it is any word, itself.
    """

    sets: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    rule: Rule | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_value(self) -> bool:
        """Whether a word follows the flag."""
        return self.arity == VALUE

    def meaning(self, words: Sequence[str]) -> Meaning:
        """Meaning of the flags that it stands for; nothing for a switch that is given as false."""
        if not self.takes_value and _is_false(words):
            return Meaning()
        if self.choices and words[0].lower() not in self.choices:
            raise UserError(f"--{self.name} {words[0]}: choose from {', '.join(self.choices)}")
        given = self.choices.get(words[0].lower(), words[0]) if words else ""
        sets = {path: given if word == GIVEN else word for path, word in self.sets.items()}
        return Meaning(sets=sets, note=self.note.replace(GIVEN, " ".join(words)), rule=self.rule)


def old_name(name: str, path: str, *, whose: str = "") -> Shortcut:
    """Another name of the flag of the field `path`; one of our own past, which is told of, or of another system."""
    ours = flag(path.partition(".")[2])
    if whose:
        return Shortcut(name=name, arity=VALUE, help=f"{whose}'s name of {ours}.", sets={path: GIVEN})
    note = f"--{name} is an old name: taken as {ours} {GIVEN}"
    return Shortcut(name=name, arity=VALUE, help=f"Old name of {ours}.", sets={path: GIVEN}, note=note)


@dataclass(frozen=True, kw_only=True)
class KnownFlag(OldFlag):
    """A flag that is recognized but sets nothing.

    refused: whether giving it is an error.
    neutral: for a refused flag, the spellings of the value that asks for nothing and is accepted, if there is one.
    reason: why it has no effect, or what to do instead.
    program: the program that it is for, where that is another one.
    feature: for a refused flag, the feature that is not offered; "" where something stands for it.
    """

    refused: bool
    reason: str
    neutral: tuple[str, ...] = ()
    program: str = ""
    feature: str = ""

    def meaning(self, words: Sequence[str]) -> Meaning:
        """A note; nothing when the words are the neutral value of one that is refused."""
        if not self.refused:
            return Meaning(note=f"--{self.name} is known but has no effect here: {self.reason}")
        if not self._asks_for_nothing(words):
            raise UserError(f"{' '.join((f'--{self.name}', *words))}: {self.reason}")
        return Meaning()

    def _asks_for_nothing(self, words: Sequence[str]) -> bool:
        if self.arity == SWITCH:
            return _is_false(words)
        return bool(self.neutral) and all(any(_same(word, one) for one in self.neutral) for word in words)


def known_flags(
    reason: str,
    *,
    refused: bool,
    switches: str = "",
    values: str = "",
    lists: str = "",
    program: str = "",
    feature: str = "",
) -> list[KnownFlag]:
    """Flags that share a reason, from their names; ``name=VALUE`` gives the neutral value of a flag, and
    ``name=VALUE|VALUE`` several spellings of it."""
    return [
        KnownFlag(
            name=name,
            arity=arity,
            refused=refused,
            reason=reason,
            neutral=tuple(filter(None, neutral.split("|"))),
            program=program,
            feature=feature,
        )
        for arity, words in ((SWITCH, switches), (VALUE, values), (VALUES, lists))
        for name, _, neutral in (word.partition("=") for word in words.split())
    ]


def _is_false(words: Sequence[str]) -> bool:
    return list(map(str.lower, words)) == ["false"]


def _same(word: str, neutral: str) -> bool:
    try:
        return float(word) == float(neutral)
    except ValueError:
        return word.lower() == neutral.lower()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Flags of another system that mean something only together: a section that is translated and then forgotten.

    section: its name; it is no section of a run.
    config: a dataclass of `option` fields.
    translate: adds what the section's values mean to all values, as a `Rule` does.
    needs: field -> what it has no effect without; every other one is looked at in any case.
    """

    section: str
    config: type
    translate: Callable[[Theirs, Explicit, Note], None]
    needs: Mapping[str, str] = field(default_factory=dict)

    def apply(self, explicit: Explicit, note: Note) -> None:
        """Applies the section's `Rule`: afterwards our flags' values are there in place of the section's."""
        theirs = Theirs(self, explicit)
        self.translate(theirs, explicit, note)
        for name in theirs.unread():
            note(f"{flag(name)}: no effect without {self.needs[name]}")
        for name in theirs.names:
            del explicit[f"{self.section}.{name}"]


class Theirs:
    """The values of a dialect's section, which remembers what was looked at.

    A flag that was given and that nothing looked at has no effect: `unread` names it. That way the rule cannot
    part from the translation.
    """

    def __init__(self, dialect: Dialect, explicit: Explicit) -> None:
        self.section = dialect.section
        self.names = [path.partition(".")[2] for path in explicit if path.partition(".")[0] == self.section]
        self._explicit = explicit
        self._values: Any = dialect.config(**{name: explicit[f"{self.section}.{name}"] for name in self.names})
        check_fields(self.section, self._values)
        self._idle = {one.name for one in field_options(self.section, dialect.config) if one.option.no_effect}
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._values, name)

    def unread(self) -> list[str]:
        """Names of what was given and not looked at, but for flags that never have an effect and say so."""
        return [name for name in self.names if name not in self._read | self._idle]

    def settle(self, name: str, path: str, value: Any, where: str) -> None:
        """Sets our field `path` to the meaning of their field `name`.

        What a higher source says about either wins. Raises UserError, starting with `where`, when one source says
        two things.
        """
        explicit = self._explicit
        level, before = explicit.levels.get(f"{self.section}.{name}", 0), explicit.levels.get(path)
        if before is None or before < level:
            explicit[path] = value
            explicit.levels[path] = level
        elif before == level and explicit[path] != value:
            ours = flag(path.partition(".")[2])
            shown = "" if isinstance(explicit[path], bool) else f" {explicit[path]}"
            raise UserError(f"{where} and {ours}{shown} contradict each other; give only one of them")


def flag(name: str) -> str:
    """A field's flag."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Translator:
    """All flags of other systems, and old ones of ours, that a command line understands.

    flags: those that mean something by themselves, in the order of --help.
    dialects: the sections of those that mean something together, in the order in which they are translated.
    """

    flags: tuple[OldFlag, ...] = ()
    dialects: tuple[Dialect, ...] = ()

    def sections(self) -> dict[str, type]:
        """The dialects: section name -> dataclass."""
        return {dialect.section: dialect.config for dialect in self.dialects}

    def translate(self, explicit: Explicit, rules: Sequence[Rule], note: Note) -> None:
        """Translates all given values into values of our own fields.

        rules: those of the flags that were given.
        """
        for rule in (*rules, *(dialect.apply for dialect in self.dialects)):
            rule(explicit, note)
