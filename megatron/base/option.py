"""Options: dataclass fields that declare their flag, unit, bounds and help text.

A section of the configuration is a frozen dataclass whose fields are made by ``option``, ``required`` or
``derived``. Everything else (the argument parser, the YAML reader, ``--help``, ``docs/reference/flags.md``, the range
checks) is generated from these declarations. The annotation of a field is its type in a *resolved*
configuration: a required or derived field is None until then.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Literal

from megatron.base.value_type import ValueType

_METADATA_KEY = "option"


def summary_of_class(cls: type) -> str:
    """First line of a class's docstring; empty without one."""
    return ((cls.__doc__ or "").strip().splitlines() or [""])[0]


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition under which an option has an effect.

    holds: the condition, on the resolved configuration and the number of processes.
    otherwise: the reason, after "no effect", where it does not hold.
    """

    holds: Callable[[Any, int], bool]
    otherwise: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of a field. Names are written without the leading dashes.

    flag: the canonical flag; None takes the field's name with hyphens. For a switch that is on by default, the flag
        turns it off (``off_switch`` is True).
    aliases: other spellings with the same meaning.
    count: the exact number of values of a list, None for any number.
    repeatable: the flag may be repeated, with a single value each time.
    unit: unit of a number.
    minimum, maximum: inclusive bounds; above, below: exclusive bounds.
    scheduled: a compressor's number that may change over the run.
    whole_ramp: a ramp of the number has integer values only.
    when_unset: for a derived field, a description of the derived value.
    no_effect: the reason why the flag has no effect; reported once when it is given.
    only_if: conditions without which the flag has no effect; reported when it is given.
    contents: "file" for paths of files, "blend" for weights and prefixes of datasets: their contents must be equal on
        all ranks, but not their paths; all other values must be equal themselves.
    may_differ: the reason why values may differ between ranks.
    checkpoint: "shape" if a checkpoint decides the value under --use-checkpoint-args, "default" if it only
        provides the value when the flag is not given.
    common: group of the short --help that shows the flag; "" for a flag that only --help all shows.
    """

    help: str
    flag: str | None = None
    aliases: tuple[str, ...] = ()
    off_switch: bool = False
    count: int | None = None
    repeatable: bool = False
    unit: str = ""
    metavar: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    required: bool = False
    scheduled: bool = False
    whole_ramp: bool = False
    when_unset: str = ""
    no_effect: str = ""
    only_if: tuple[Condition, ...] = ()
    contents: str = ""
    may_differ: str = ""
    checkpoint: str = ""
    common: str = ""


def option(default: Any, help: str, **details: Any) -> Any:
    """A field with a default. ``details`` are the attributes of Option."""
    metadata = {_METADATA_KEY: Option(help=help, **details)}
    if isinstance(default, list):
        # A list is not hashable; leaving it out keeps the section hashable.
        return dataclasses.field(default_factory=default.copy, hash=False, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str, **details: Any) -> Any:
    """A field that must be given; None until then."""
    return option(None, help, required=True, **details)


def derived(when_unset: str, help: str, **details: Any) -> Any:
    """A field that is derived from other fields on resolving, if not given; None until then."""
    return option(None, help, when_unset=when_unset, **details)


@dataclasses.dataclass(frozen=True)
class FieldOption:
    """A field of a section, with its option and its resolved type.

    element is the type of the value, or of an element if ``is_list``. choices are the allowed values of a field
    annotated with a Literal, compared without regard to case, hyphens and underscores.
    """

    section: str
    name: str
    option: Option
    element: type
    is_list: bool
    default: Any
    choices: tuple[str, ...]

    @cached_property
    def value_type(self) -> ValueType:
        """Type and bounds of the value, or of an element if ``is_list``."""
        option = self.option
        return ValueType(
            element=self.element,
            choices=self.choices,
            minimum=option.minimum,
            maximum=option.maximum,
            above=option.above,
            below=option.below,
            percent=option.unit == "percent",
        )

    @property
    def path(self) -> str:
        """The dotted name ``section.field``, used for fields throughout this package."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """The canonical flag, without dashes."""
        return self.option.flag or self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the field is a boolean, whose flag needs no value."""
        return self.element is bool and not self.is_list

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings without dashes, the canonical flag first."""
        return (self.flag, *self.option.aliases)


def is_unset(value: object) -> bool:
    """Whether a required or derived field was not given."""
    return value is None


def field_options(section: str, cls: type) -> tuple[FieldOption, ...]:
    """The declared fields of the dataclass ``cls``, in order."""
    return _declared_fields(section, typing.cast(typing.Hashable, cls))


@cache
def _declared_fields(section: str, cls: Any) -> tuple[FieldOption, ...]:
    """Cached ``field_options``, since every check and help line calls it."""
    hints = typing.get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        declaration = field.metadata.get(_METADATA_KEY, Option(help=""))  # a compressor's fields need no option()
        hint = hints[field.name]
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
        is_list = typing.get_origin(hint) is list
        element = typing.get_args(hint)[0] if is_list else hint
        choices: tuple[str, ...] = ()
        if typing.get_origin(element) is Literal:
            element, choices = str, typing.get_args(element)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = field.default
        fields.append(FieldOption(section, field.name, declaration, element, is_list, default, choices))
    return tuple(fields)
