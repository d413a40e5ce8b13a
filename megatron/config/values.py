"""Values of files that others wrote, taken only when they are of the kind that is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.base.errors import UserError
from megatron.config.model import MOST


class Values:
    """Names and values, of which None counts as missing.

    Args:
        content: what a file holds.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def has(self, name: str) -> bool:
        """Whether there is a value."""
        return self._content.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether the name is there, whatever its value."""
        return name in self._content

    def _value(self, name: str, default: Any, what: str, fits: Any) -> Any:
        if not self.has(name):
            if default is None:
                raise UserError(f"{name} is missing")
            return default
        value = self._content[name]
        if not fits(value):
            raise UserError(f"{name} is {_shown(value)}, not {what}")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """A whole number in a range; without a default it must be there.

        Raises:
            UserError: when it is missing or something else, as for the other kinds.
        """

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

        return int(self._value(name, default, f"a whole number from {least} to {most}", fits))

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""

        def fits(value: Any) -> bool:
            try:
                return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            except OverflowError as error:
                raise UserError(f"{name} is too large a number") from error

        return float(self._value(name, default, "a number", fits))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        return bool(self._value(name, default, "true or false", lambda value: isinstance(value, bool)))

    def text(self, name: str, default: str | None = None) -> str:
        """A text."""
        return str(self._value(name, default, "a text", lambda value: isinstance(value, str)))

    def texts(self, name: str) -> list[str]:
        """Several texts, which must be there."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(one, str) for one in value)

        return list(self._value(name, None, "a list of texts", fits))

    def table(self, name: str, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Names and values below a name."""
        found: Mapping[str, Any] = self._value(
            name, default, "names and values", lambda value: isinstance(value, Mapping)
        )
        return found


def _shown(value: Any) -> str:
    text = f"the text {value!r}" if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
