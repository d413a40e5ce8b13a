"""Translation rules for flags of other systems and our old flags.

An independent flag is an `OldFlag`, which sets words of our fields or refuses. Interdependent flags are translated by a
`Rule` on all values once every source is read; a `Dialect` is a section of such flags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.option import field_options
from megatron.base.user_text import Note, flag_of
from megatron.base.value_type import FALSE_WORDS, ValueType

SWITCH, VALUE, VALUES = "switch", "value", "values"
"""Number of words after a flag: none (or true or false), one, any number."""

ARGUMENT = "{value}"
"""Placeholder for the argument of a flag in the tables."""


class ExplicitValues(dict[str, Any]):
    """Values that the user gave: dotted field -> value.

    levels: dotted field -> precedence of its source; higher levels win.
    """

    def __init__(self) -> None:
        super().__init__()
        self.levels: dict[str, int] = {}


Rule = Callable[[ExplicitValues, Note], None]
"""Translates interdependent values, and notes the result. Raises UserError for impossible combinations."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Meaning of a flag with its arguments.

    sets: dotted field -> word, as if given with the flag of the field.
    note: line to report; may be empty.
    rule: runs once all sources are read.
    """

    sets: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    rule: Rule | None = None


@dataclass(frozen=True, kw_only=True)
class OldFlag(ABC):
    """Flag without a field.

    name: without dashes.
    arity: SWITCH, VALUE or VALUES.
    help: help text; --help hides the flag if empty.
    """

    name: str
    arity: str = SWITCH
    help: str = ""

    @abstractmethod
    def meaning(self, words: Sequence[str]) -> Meaning:
        """Meaning of the flag with these arguments. Raises UserError if they are refused."""


@dataclass(frozen=True, kw_only=True)
class Shortcut(OldFlag):
    """Shorthand for other flags: an old name, or a switch that sets a field to a fixed value.

    sets, note, rule: its meaning; ARGUMENT stands for the argument of the flag.
    choices: allowed argument -> replacement of ARGUMENT in `sets`; empty: any argument, unchanged.
    """

    sets: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    rule: Rule | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

    def meaning(self, words: Sequence[str]) -> Meaning:
        """Meaning of the flag; empty for a switch set to false."""
        if self.arity == SWITCH and words and not ValueType(element=bool).from_text(words[0], f"--{self.name}"):
            return Meaning()
        if self.choices and words[0].lower() not in self.choices:
            raise UserError(f"--{self.name} {words[0]}: choose from {', '.join(self.choices)}")
        argument = self.choices.get(words[0].lower(), words[0]) if words else ""
        sets = {path: argument if word == ARGUMENT else word for path, word in self.sets.items()}
        return Meaning(sets=sets, note=self.note.replace(ARGUMENT, " ".join(words)), rule=self.rule)


def old_name(name: str, path: str, *, system: str = "") -> Shortcut:
    """Alias for the flag of the field `path`: its name in system `system`, or our old name, which is reported."""
    ours = flag_of(path)
    if system:
        return Shortcut(name=name, arity=VALUE, help=f"{system}'s name of {ours}.", sets={path: ARGUMENT})
    note = f"--{name} is an old name: taken as {ours} {ARGUMENT}"
    return Shortcut(name=name, arity=VALUE, help=f"Old name of {ours}.", sets={path: ARGUMENT}, note=note)


@dataclass(frozen=True, kw_only=True)
class KnownFlag(OldFlag):
    """Flag that is recognized but sets nothing.

    refused: whether giving it is an error.
    neutral: for a refused flag, the spellings of its neutral value, which is accepted; may be empty.
    reason: why it has no effect, or the alternative.
    program: the program that accepts it, if not this program.
    feature: for a refused flag, the feature that is not offered; "" if there is an equivalent.
    """

    refused: bool
    reason: str
    neutral: tuple[str, ...] = ()
    program: str = ""
    feature: str = ""

    def meaning(self, words: Sequence[str]) -> Meaning:
        """Meaning with a note only; empty for the neutral value of a refused flag."""
        if not self.refused:
            return Meaning(note=f"--{self.name} is known but has no effect here: {self.reason}")
        if self.arity == SWITCH:
            is_neutral = bool(words) and words[0].lower() in FALSE_WORDS
        else:
            matches = [any(_same(word, spelling) for spelling in self.neutral) for word in words]
            is_neutral = bool(self.neutral) and all(matches)
        if not is_neutral:
            raise UserError(f"{' '.join((f'--{self.name}', *words))}: {self.reason}")
        return Meaning()


def _same(word: str, neutral: str) -> bool:
    try:
        return float(word) == float(neutral)
    except ValueError:
        return word.lower() == neutral.lower()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Section of interdependent flags of another system, removed after translation.

    section: its name; not a section of a run.
    config: a dataclass of `option` fields.
    translate: translates the section and adds the results to the explicit values, as a `Rule` does.
    needs: field -> setting without which it has no effect; all other fields are always read.
    """

    section: str
    config: type
    translate: Callable[[SectionValues, ExplicitValues, Note], None]
    needs: Mapping[str, str] = field(default_factory=dict)

    def apply(self, explicit: ExplicitValues, note: Note) -> None:
        """Translate the section: replace its explicit values by values of our fields."""
        theirs = SectionValues(self, explicit)
        self.translate(theirs, explicit, note)
        for name in theirs.unread():
            note(f"{flag_of(name)}: no effect without {self.needs[name]}")
        for name in theirs.names:
            del explicit[f"{self.section}.{name}"]


class SectionValues:
    """Values of the section of a dialect, with tracking of reads.

    A given flag that was never read has no effect and is named by `unread`, so notes always match the translation.
    """

    def __init__(self, dialect: Dialect, explicit: ExplicitValues) -> None:
        self.section = dialect.section
        self.names = [path.partition(".")[2] for path in explicit if path.partition(".")[0] == self.section]
        self._explicit = explicit
        self._values: Any = dialect.config(**{name: explicit[f"{self.section}.{name}"] for name in self.names})
        check_fields(self.section, self._values)
        self._idle = {
            field_option.name
            for field_option in field_options(self.section, dialect.config)
            if field_option.option.no_effect
        }
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._values, name)

    def unread(self) -> list[str]:
        """Names of given fields that were never read, without fields that declare `no_effect`."""
        return [name for name in self.names if name not in self._read | self._idle]

    def set_field(self, name: str, path: str, value: Any, location: str) -> None:
        """Set our field `path` to `value`, the translation of their field `name`.

        The source of higher precedence wins. Raises UserError starting with `location` if a source contradicts itself.
        """
        explicit = self._explicit
        level, previous_level = explicit.levels.get(f"{self.section}.{name}", 0), explicit.levels.get(path)
        if previous_level is None or previous_level < level:
            explicit[path] = value
            explicit.levels[path] = level
        elif previous_level == level and explicit[path] != value:
            ours = flag_of(path)
            value_text = "" if isinstance(explicit[path], bool) else f" {explicit[path]}"
            raise UserError(f"{location} and {ours}{value_text} contradict each other; give only one of them")


@dataclass(frozen=True, kw_only=True)
class Translator:
    """Translator of all supported flags of other systems and of our old flags.

    flags: independent flags, in the order of --help.
    dialects: sections of interdependent flags, in the order of translation.
    retired_fields: default by dotted name of fields that are gone, which saved configurations may still have.
    """

    flags: tuple[OldFlag, ...] = ()
    dialects: tuple[Dialect, ...] = ()
    retired_fields: Mapping[str, object] = field(default_factory=dict)

    def sections(self) -> dict[str, type]:
        """Section name -> dataclass of each dialect."""
        return {dialect.section: dialect.config for dialect in self.dialects}

    def translate(self, explicit: ExplicitValues, rules: Sequence[Rule], note: Note) -> None:
        """Translate all explicit values into values of our fields.

        rules: rules of the given flags.
        """
        for rule in (*rules, *(dialect.apply for dialect in self.dialects)):
            rule(explicit, note)
