"""From text and plain YAML values to the typed values of fields, and the checks that need one field only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.base.errors import UserError
from megatron.base.numerals import checked_number, checked_whole, read_number, read_whole, shortened
from megatron.base.option import FieldOption, field_options

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def spell(name: str) -> str:
    """The form in which flag and field names are compared: hyphens, lower case, without the two leading dashes."""
    return name.removeprefix("--").replace("_", "-").lower()


def from_text(field: FieldOption, texts: Sequence[str], where: str) -> Any:
    """The value of `field` from the words given for it. A switch given without a word is on.

    `where` starts the message of the UserError that a bad word raises, such as "--num-layers".
    The value returned is the field's own: a switch that turns a default off gives False.
    """
    if field.is_switch:
        return _switch(field, texts[0] if texts else "true", where)
    if field.is_list:
        values = [_scalar(field, text, where) for text in texts]
        _check_count(field, values, where)
        return values
    return _scalar(field, texts[0], where)


def from_plain(field: FieldOption, value: Any, where: str) -> Any:
    """The value of `field` from what a YAML file or a dictionary holds under the field's own name."""
    if value is None:
        return list(field.default) if isinstance(field.default, list) else field.default
    if field.is_list:
        items = value if isinstance(value, list) else [value]
        values = [_plain_scalar(field, item, where) for item in items]
        _check_count(field, values, where)
        return values
    return _plain_scalar(field, value, where)


def _plain_scalar(field: FieldOption, value: Any, where: str) -> Any:
    if isinstance(value, (list, dict)):
        raise UserError(f"{where}: expected one value, not a {type(value).__name__}")
    if field.element is bool:
        if isinstance(value, bool):
            return value
        return _boolean(str(value), where)
    if isinstance(value, bool):
        # YAML 1.1 reads a bare on or off as a boolean.
        word = "on" if value else "off"
        if word not in field.choices:
            raise UserError(f"{where}: expected {_kind(field)}, not {str(value).lower()}")
        return word
    if isinstance(value, (int, float)):
        return _plain_number(field, value, where)
    return _scalar(field, str(value), where)


def _plain_number(field: FieldOption, value: float, where: str) -> Any:
    """The value of a field of any kind from a number that a YAML file holds."""
    try:
        if field.element is float:
            return checked_number(value)
        if isinstance(value, int):
            checked_whole(value)  # before it is written out, which Python refuses for very long ones
        elif field.element is int:
            if not value.is_integer():
                raise ValueError("is not an integer")
            return checked_whole(int(value))
    except ValueError as error:
        raise UserError(f"{where}: {_digits(value)} {error}") from None
    return _scalar(field, repr(value), where)


def _digits(value: float) -> str:
    """A number for a message, however long it is."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _switch(field: FieldOption, text: str, where: str) -> bool:
    given = _boolean(text, where)
    return not given if field.option.off_switch else given


def _boolean(text: str, where: str) -> bool:
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise UserError(f"{where}: {shortened(text)!r} is neither true nor false")


def _scalar(field: FieldOption, text: str, where: str) -> Any:
    if field.element is bool:
        return _boolean(text, where)
    if field.element in (int, float):
        try:
            return read_whole(text) if field.element is int else read_number(text)
        except ValueError as error:
            raise UserError(f"{where}: {shortened(text)!r} {error}") from None
    if field.choices:
        return _choice(field.choices, text, where)
    if not text.strip():
        raise UserError(
            f"{where}: the value is empty; is a shell variable not set? Give {_kind(field)}, or leave it out"
        )
    return _printable(text, where)


def _printable(text: str, where: str) -> str:
    """A text that a log and a file's name can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: {text!r} is not UTF-8; use other characters") from None
    if "\0" in text:
        raise UserError(f"{where}: {shortened(text)!r} holds a null character; leave it out")
    return text


def _choice(choices: Sequence[str], text: str, where: str) -> str:
    for choice in choices:
        if spell(choice) == spell(text):
            return choice
    raise UserError(f"{where}: {shortened(text)!r} is not one of {', '.join(choices)}")


def _check_count(field: FieldOption, values: Sequence[Any], where: str) -> None:
    count = field.option.count
    if count is not None and len(values) != count:
        raise UserError(f"{where}: expected {count} values, got {len(values)}")


def _kind(field: FieldOption) -> str:
    if field.choices:
        return f"one of {', '.join(field.choices)}"
    return {int: "an integer", float: "a number", bool: "true or false"}.get(field.element, "text")


def check_fields(section: str, values: Any) -> None:
    """Check type, choices and bounds of every field of the dataclass instance `values`, each on its own.

    Raises UserError naming the flag of the first field that does not hold. Missing required fields are found
    by `check_required`.
    """
    for field in field_options(section, type(values)):
        value = getattr(values, field.name)
        if value is None:
            if field.default is not None:
                raise UserError(f"--{field.flag} has no value; give {_kind(field)}")
            continue
        where = f"--{field.flag}"
        checked = from_plain(field, value, where)
        for number in checked if field.is_list else [checked]:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                _check_bounds(field, number)


def check_required(section: str, values: Any) -> None:
    """Raise UserError naming the flags of all required fields that were not given."""
    missing = [
        f"--{field.flag}"
        for field in field_options(section, type(values))
        if field.option.required and getattr(values, field.name) is None
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} required and {verb} not given")


def bounds_text(field: FieldOption) -> str:
    """The bounds of a number in words, such as "at least 0 and below 1"; empty without bounds."""
    option = field.option
    parts = [
        f"{words} {_bound(bound)}"
        for words, bound in (
            ("at least", option.minimum),
            ("above", option.above),
            ("at most", option.maximum),
            ("below", option.below),
        )
        if bound is not None
    ]
    return " and ".join(parts)


_SINGLE = (2.0**-126, 2.0**126)
"""Magnitudes that single precision, in which nearly every number here is used, holds in full."""


def _bound(number: float) -> str:
    return f"{number:_}" if isinstance(number, int) and number >= 1000 else f"{number:g}"


def _check_bounds(field: FieldOption, number: float) -> None:
    option = field.option
    inside = (
        (option.minimum is None or number >= option.minimum)
        and (option.maximum is None or number <= option.maximum)
        and (option.above is None or number > option.above)
        and (option.below is None or number < option.below)
    )
    if not inside:
        raise UserError(f"--{field.flag} is {_given(number)}; it must be {bounds_text(field)}")
    if isinstance(number, float) and number and not _SINGLE[0] <= abs(number) <= _SINGLE[1]:
        raise UserError(f"--{field.flag} is {number:g}, which is beyond single precision; give a number that is meant")


def _given(number: float) -> str:
    return f"{number:_}" if isinstance(number, int) or abs(number) < 1e15 else f"{number:g}"


def section_from_plain(section: str, cls: type, values: dict[str, Any], where: str) -> Any:
    """Build the dataclass `cls` from plain values under its field names, all of which must be known.

    Raises UserError starting with `where` for an unknown name or a value of the wrong type.
    """
    fields = {field.name: field for field in field_options(section, cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UserError(f"{where}: unknown key {section}.{unknown[0]}{nearest(unknown[0], list(fields))}")
    converted = {name: from_plain(fields[name], value, f"{where}: {section}.{name}") for name, value in values.items()}
    return cls(**converted)


def section_to_plain(values: Any) -> dict[str, Any]:
    """The fields of a section as plain types: what YAML can hold."""
    return dataclasses.asdict(values)


def nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """The words "; the nearest is ..." for a misspelt `name`, or nothing when no known name is near."""
    import difflib

    spelled = {spell(candidate): candidate for candidate in known}
    word = spell(name)
    longer = [candidate for candidate in spelled if candidate.startswith(word)]
    close = difflib.get_close_matches(word, list(spelled), n=1, cutoff=0.6)
    if len(longer) == 1 or (longer and not close):
        close = [min(longer, key=len)]
    return f"; the nearest is {prefix}{spelled[close[0]]}" if close else ""
