"""Reads and checks declared fields: single values, or a whole dataclass from plain values or words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from megatron.base.errors import UserError
from megatron.base.option import FieldOption, field_options
from megatron.base.user_text import nearest

T = TypeVar("T")

_SINGLE_PRECISION_RANGE = (2.0**-126, 2.0**126)
"""Range of magnitudes that single precision, used for nearly every number, represents in full precision."""


def from_text(field: FieldOption, texts: Sequence[str], location: str) -> Any:
    """Parse the value of ``field`` from words. A switch without a word is on.

    ``location``, such as "--num-layers", starts the message of the UserError that a bad word raises.
    Returns the field's value: False for a switch that turns off a default.
    """
    if field.is_switch:
        value = field.value_type.from_text(texts[0] if texts else "true", location)
        return not value if field.option.off_switch else value
    if field.is_list:
        values = [field.value_type.from_text(text, location) for text in texts]
        _check_count(field, values, location)
        return values
    return field.value_type.from_text(texts[0], location)


def from_plain(field: FieldOption, value: Any, location: str) -> Any:
    """Read the value of ``field`` from YAML or a dictionary."""
    if value is None:
        return list(field.default) if isinstance(field.default, list) else field.default
    if field.is_list:
        items = value if isinstance(value, list) else [value]
        values = [field.value_type.from_plain(item, location) for item in items]
        _check_count(field, values, location)
        return values
    return field.value_type.from_plain(value, location)


def _check_count(field: FieldOption, values: Sequence[Any], location: str) -> None:
    count = field.option.count
    if count is not None and len(values) != count:
        raise UserError(f"{location}: expected {count} values, got {len(values)}")


def check_fields(section: str, values: Any) -> None:
    """Check type, choices and bounds of each field of the dataclass instance ``values`` separately.

    ``missing_flags`` lists missing required fields.

    Raises:
        UserError: when a field is invalid; the message names the flag of the first.
    """
    for field in field_options(section, type(values)):
        value, label = getattr(values, field.name), f"--{field.flag}"
        if value is None:
            if field.default is not None:
                raise UserError(f"{label} has no value; give {field.value_type.name}")
            continue
        checked = from_plain(field, value, label)
        for number in checked if field.is_list else [checked]:
            field.value_type.check_bounds(number, label)
            low, high = _SINGLE_PRECISION_RANGE
            if isinstance(number, float) and number and not low <= abs(number) <= high:
                raise UserError(f"{label} is {number:g}, outside the range of single precision; correct the number")


def missing_flags(section: str, values: Any) -> list[str]:
    """Flags of the required fields without a value."""
    return [
        f"--{field.flag}"
        for field in field_options(section, type(values))
        if field.option.required and getattr(values, field.name) is None
    ]


def section_from_plain(section: str, cls: type, values: dict[str, Any], location: str) -> Any:
    """Build the dataclass ``cls`` from plain values by field name; every name must be known.

    Raises:
        UserError: when a name is unknown or a value has the wrong type; the message starts with ``location``.
    """
    fields = {field.name: field for field in field_options(section, cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UserError(f"{location}: unknown key {section}.{unknown[0]}{nearest(unknown[0], list(fields))}")
    converted = {
        name: from_plain(fields[name], value, f"{location}: {section}.{name}") for name, value in values.items()
    }
    return cls(**converted)


def options_from_words(cls: type[T], words: Mapping[str, str], owner: str) -> T:
    """Build the dataclass ``cls`` from words by flag, which must be known; other options keep their defaults.

    Raises:
        UserError: when a word has the wrong type or is out of bounds; the message names the owner and the option.
    """
    fields = {field.flag: field for field in field_options(owner, cls)}
    values = {}
    for flag, word in words.items():
        field, label = fields[flag], f"{owner}: {flag}"
        values[field.name] = value = from_text(field, [word], label)
        field.value_type.check_bounds(value, label)
    return cls(**values)
