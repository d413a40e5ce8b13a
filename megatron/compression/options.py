"""Options of compressors: frozen dataclasses whose fields describe themselves, read from ``key=value`` words."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from megatron.base.errors import UserError
from megatron.base.numerals import read_number, read_whole, shortened

T = TypeVar("T")


class CompressorFault(RuntimeError):
    """What a compressor relies on in a run does not hold; one line that says what, and what to do."""


SEED = (1 << 63) - 1
"""The largest seed of a compressor."""


def opt(
    default: Any,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    scheduled: bool = False,
    above: float | None = None,
) -> Any:
    """A field of an options dataclass.

    Args:
        default: the value when it is not given; its annotation (int, float, bool, str or a Literal) is its type.
        help: what it does, in a few words.
        minimum, maximum: inclusive bounds of a number.
        above: an exclusive bound of a number.
        scheduled: the number may change over the run (``megatron.compression.schedule.Schedule``).
    """
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "above": above, "scheduled": scheduled}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """One option of a compressor, for messages and lists."""

    name: str
    kind: str
    default: Any
    help: str
    scheduled: bool = False


def spelled(name: str) -> str:
    """An option's name as users write it."""
    return name.replace("_", "-")


def option_infos(cls: type[Any]) -> list[OptionInfo]:
    """The options of a class, in order."""
    hints = typing.get_type_hints(cls)
    return [
        OptionInfo(
            spelled(field.name),
            _kind(hints[field.name]),
            field.default,
            field.metadata.get("help", ""),
            field.metadata.get("scheduled", False),
        )
        for field in dataclasses.fields(cls)
    ]


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    return "on|off" if hint is bool else str(hint.__name__)


def read_options(cls: type[T], values: Mapping[str, str], owner: str) -> T:
    """An instance of an options dataclass.

    Args:
        cls: the dataclass.
        values: option name as the user wrote it -> text.
        owner: named in messages.

    Raises:
        UserError: for an unknown option, or a value that is not of its type or out of bounds.
    """
    hints = typing.get_type_hints(cls)
    fields = {spelled(field.name): field for field in dataclasses.fields(typing.cast(Any, cls))}
    built: dict[str, Any] = {}
    for name, text in values.items():
        field = fields.get(spelled(name.strip().lower()))
        if field is None:
            known = ", ".join(fields) or "none"
            raise UserError(f"{owner} has no option {name!r}; its options are: {known}")
        where = f"{owner}: {spelled(name)}={shortened(text)}"
        built[field.name] = _value(hints[field.name], text.strip(), where, field.metadata)
    return cls(**built)


def _value(hint: Any, text: str, where: str, bounds: Mapping[str, Any]) -> Any:
    if typing.get_origin(hint) is Literal:
        for choice in typing.get_args(hint):
            if str(choice).lower() == text.lower():
                return choice
        raise UserError(f"{where}: the choices are {', '.join(map(str, typing.get_args(hint)))}")
    if hint is bool:
        if text.lower() in ("on", "true", "yes", "1"):
            return True
        if text.lower() in ("off", "false", "no", "0"):
            return False
        raise UserError(f"{where}: write on or off")
    if hint is str:
        return text
    try:
        value = read_whole(text) if hint is int else read_number(text)
    except ValueError as error:
        kind = "a whole number" if hint is int else "a number"
        raise UserError(f"{where}: expected {kind}, and it {error}") from None
    low, high, above = bounds.get("minimum"), bounds.get("maximum"), bounds.get("above")
    outside = (low is not None and value < low) or (high is not None and value > high)
    if outside or (above is not None and value <= above):
        raise UserError(f"{where}: must be {_span(low, high, above)}")
    return value


def _span(low: float | None, high: float | None, above: float | None) -> str:
    """The bounds of a number in words."""
    if low is not None and high is not None:
        return f"from {low} to {high}"
    parts = [f"above {above}" if above is not None else "", f"at least {low}" if low is not None else ""]
    return " and ".join(part for part in [*parts, f"at most {high}" if high is not None else ""] if part)
