"""Field values collected from flags and YAML files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.base.errors import ErrorList, UserError
from megatron.base.fields import from_plain, from_text
from megatron.base.option import FieldOption, field_options
from megatron.base.user_text import nearest, spell
from megatron.base.value_type import FALSE_WORDS
from megatron.config.translate.rules import SWITCH, VALUES, OldFlag, Rule, Translator

Target = FieldOption | OldFlag


class FlagTable:
    """Table of accepted flag and field spellings with their targets.

    own_sections: section name -> dataclass of `option` fields; `sections` also holds the translator's sections.
    fields, fields_by_name: fields of all sections by dotted name, and by their own names, normalized.
    Clashing spellings are a programming error and raise ValueError.
    """

    def __init__(self, own_sections: dict[str, type], translator: Translator) -> None:
        self.own_sections = own_sections
        self.translator = translator
        self.sections = {**own_sections, **translator.sections()}
        self.fields: dict[str, FieldOption] = {}
        self.fields_by_name: dict[str, FieldOption] = {}
        self._by_flag: dict[str, Target] = {}
        for section, cls in self.sections.items():
            for field_option in field_options(section, cls):
                field_name = f"{cls.__name__}.{field_option.name}"
                if not field_option.option.help:
                    raise TypeError(f"{field_name} has no option(): every field of a section needs one")
                if field_option.is_switch and field_option.default is True and not field_option.option.off_switch:
                    raise TypeError(f"{field_name} is on by default and needs a flag that turns it off")
                self.fields[field_option.path] = field_option
                if self.fields_by_name.setdefault(spell(field_option.name), field_option) is not field_option:
                    raise ValueError(f"two sections have a field {field_option.name}")
        for flag, target in self.spellings():
            if self._by_flag.setdefault(spell(flag), target) is not target:
                raise ValueError(f"two meanings for --{flag}")

    def spellings(self) -> Iterator[tuple[str, Target]]:
        """All declared flags and aliases, without dashes, with their targets."""
        for field_option in self.fields.values():
            yield from ((flag, field_option) for flag in field_option.flags)
        for old in self.translator.flags:
            yield old.name, old

    def by_flag(self, flag: str) -> Target | None:
        """Target of a flag, in any spelling."""
        return self._by_flag.get(spell(flag))

    def nearest_flag(self, flag: str) -> str:
        """Hint for an unknown flag: the nearest known flag, preferably with an effect."""
        effective_flags = [name for name, target in self._by_flag.items() if not _is_hidden(target)]
        return nearest(flag, [*effective_flags, "config", "help"], "--") or nearest(flag, list(self._by_flag), "--")


def _is_hidden(target: Target) -> bool:
    """Whether --help hides a flag. Hidden flags have no effect."""
    return isinstance(target, OldFlag) and not target.help


@dataclass
class Source:
    """Values of a single source: the command line or a YAML file.

    rules: translations of its old flags that depend on other values.
    """

    table: FlagTable
    values: dict[str, Any] = field(default_factory=dict)
    spellings_by_path: dict[str, str] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    switched_on: set[str] = field(default_factory=set)

    def add_flag(self, target: Target, spelling: str, texts: Sequence[str]) -> None:
        """Add a flag with its arguments. Messages name it by `spelling`."""
        name = spell(spelling)
        if len(texts) == 1 and texts[0].lower() in FALSE_WORDS:
            self.switched_on.discard(name)
        else:
            self.switched_on.add(name)
            opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
            if opposite in self.switched_on:
                raise UserError(f"--{opposite} and --{name} contradict each other; give only one of them")
        if isinstance(target, FieldOption):
            self._set(target, from_text(target, texts, spelling), spelling)
            return
        meaning = target.meaning(texts)
        for path, word in meaning.sets.items():
            field_option = self.table.fields[path]
            self._set(field_option, from_text(field_option, [word], spelling), spelling)
        if meaning.rule is not None:
            self.rules.append(meaning.rule)
        self._note(meaning.note)

    def add_plain(self, target: FieldOption, value: Any, spelling: str) -> None:
        """Add a YAML value given under the name of its field. None keeps the default."""
        if value is not None:
            self._set(target, from_plain(target, value, spelling), spelling)

    def _set(self, target: FieldOption, value: Any, spelling: str) -> None:
        path = target.path
        if target.option.repeatable and self.spellings_by_path.get(path) == spelling:
            self.values[path] = [*self.values[path], *value]
            return
        previous_spelling = self.spellings_by_path.get(path)
        if previous_spelling is not None and previous_spelling != spelling and self.values[path] != value:
            raise UserError(f"{previous_spelling} and {spelling} contradict each other; give only one of them")
        if previous_spelling == spelling and self.values[path] != value:
            self._note(f"{spelling} is given more than once; the last one counts")
        self.values[path] = value
        self.spellings_by_path[path] = spelling
        is_changed = value != target.default
        if target.option.no_effect and is_changed:
            self._note(f"{spelling} is known but has no effect here: {target.option.no_effect}")

    def _note(self, line: str) -> None:
        if line and line not in self.notes:
            self.notes.append(line)


def collect_yaml(table: FlagTable, content: dict[str, Any], path: str, errors: ErrorList) -> Source:
    """Collect a YAML mapping of sections, or directly of field names or flags.

    Unusable keys are added to `errors` with the file and the key.
    """
    source = Source(table)
    for key, value in content.items():
        if isinstance(value, dict):
            section = next((name for name in table.sections if spell(name) == spell(str(key))), None)
            if section is None:
                hint = nearest(str(key), list(table.sections))
                errors.messages.append(f"{path}: unknown section {key}{hint}")
                continue
            for name, inner in value.items():
                with errors.collect():
                    _add_key(source, str(name), inner, path, f"{section}.{name}", section)
        else:
            with errors.collect():
                _add_key(source, str(key), value, path, str(key), None)
    return source


def _add_key(source: Source, name: str, value: Any, path: str, key_path: str, section: str | None) -> None:
    table = source.table
    field_option = table.fields_by_name.get(spell(name))
    target = field_option or table.by_flag(name)
    retired = table.translator.retired_fields
    if key_path in retired and (target is None or value == retired[key_path]):
        return
    if target is None or (isinstance(target, FieldOption) and section not in (None, target.section)):
        hint = nearest(name, [field_option.name for field_option in table.fields.values()]) or table.nearest_flag(name)
        raise UserError(f"{path}: unknown key {key_path}{hint}")
    spelling = f"{path}: {key_path}"
    if field_option is not None or (isinstance(target, FieldOption) and not target.option.off_switch):
        source.add_plain(target, value, spelling)  # type: ignore[arg-type]
        return
    if value is None or (value is False and isinstance(target, OldFlag) and target.arity == SWITCH):
        return
    items = value if isinstance(value, list) else [value]
    if not items:
        raise UserError(f"{spelling}: expected a value, not an empty list")
    if len(items) > 1 and not (isinstance(target, OldFlag) and target.arity == VALUES):
        raise UserError(f"{spelling}: expected one value, not a list of {len(items)}")
    if any(isinstance(item, (list, dict)) for item in items):
        raise UserError(f"{spelling}: expected a value or a list of values, not a nested one")
    if isinstance(target, OldFlag) and _is_hidden(target):
        spelling = f"--{target.name}"
    words = []
    for item in items:
        if isinstance(item, int) and item.bit_length() > 200:
            raise UserError(f"{spelling}: a number of {item.bit_length()} bits is too large")
        words.append(str(item).lower() if isinstance(item, bool) else str(item))
    source.add_flag(target, spelling, words)
