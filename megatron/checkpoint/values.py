"""Checked values of a checkpoint's documents, which may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.errors import UserError

_BEYOND = 1 << 62


def section_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping under a name.

    Raises:
        UserError: when there is none, or it is something else.
    """
    value = _of(values, name)
    if not isinstance(value, dict):
        raise UserError(f"{name} is a {type(value).__name__} instead of names and values")
    return value


def count_of(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number that is not negative.

    Raises:
        UserError: when there is none and no default, or it is something else.
    """
    if default is not None and name not in values:
        return default
    value = _of(values, name)
    if type(value) is not int or not 0 <= value < _BEYOND:
        raise UserError(f"{name} is {_shown(value)} instead of a whole number of at least 0")
    return value


def switch_of(values: Mapping[str, Any], name: str) -> bool:
    """True or false.

    Raises:
        UserError: when it is something else.
    """
    value = _of(values, name)
    if not isinstance(value, bool):
        raise UserError(f"{name} is {_shown(value)} instead of true or false")
    return value


def _of(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise UserError(f"{name} is missing")
    return values[name]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
