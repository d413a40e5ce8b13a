"""Kinds of values and their only reader: from words, hand-written YAML, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import UserError
from megatron.base.parse_numbers import checked_number, checked_whole, read_number, read_whole
from megatron.base.user_text import format_value, shortened, spell

_TRUE = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
"""Words that turn a switch off, in lower case."""
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_PYTHON_TYPES: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}


@dataclass(frozen=True, kw_only=True)
class ValueType:
    """Type of a value, with its choices or bounds.

    Every method raises UserError for a value that does not fit. The message begins with ``location``, which names the
    value: "--num-layers", "run.yaml: model.num_layers", "n_layer".

    element: int, float, bool or str.
    choices: the allowed strings, compared without regard to case, hyphens and underscores.
    minimum, maximum: inclusive bounds of a number; above, below: exclusive bounds.
    percent: whether the number is a percentage, which may be written with "%".
    """

    element: type
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    percent: bool = False

    @property
    def name(self) -> str:
        """Description of the type, with its article: "an integer", "one of cpu, cuda"."""
        return f"one of {', '.join(self.choices)}" if self.choices else _NAMES[self.element]

    @property
    def bounds(self) -> str:
        """Description of the bounds, such as "at least 0 and below 1"; empty without bounds."""
        limits = (("at least", self.minimum), ("above", self.above), ("at most", self.maximum), ("below", self.below))
        return " and ".join(
            f"{words} {bound:_}" if isinstance(bound, int) and bound >= 1000 else f"{words} {bound:g}"
            for words, bound in limits
            if bound is not None
        )

    def from_text(self, text: str, location: str) -> Any:
        """Parse a word of a command line or a spec; ``check_bounds`` checks bounds."""
        if self.element is bool:
            word = text.lower()
            if word in _TRUE:
                return True
            if word in FALSE_WORDS:
                return False
            raise UserError(f"{location}: {shortened(text)!r} is neither true nor false")
        if self.element in (int, float):
            number_text = text.strip().removesuffix("%") if self.percent else text
            try:
                return read_whole(number_text) if self.element is int else read_number(number_text)
            except ValueError as error:
                raise UserError(f"{location}: {shortened(text)!r} {error}") from None
        if self.choices:
            return _choice(self.choices, text, location)
        if not text.strip():
            raise UserError(
                f"{location}: the value is empty; is a shell variable not set? Give {self.name}, or leave it out"
            )
        # Texts go into logs and file names.
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{location}: {text!r} is not UTF-8; use other characters") from None
        if "\0" in text:
            raise UserError(f"{location}: {shortened(text)!r} holds a null character; leave it out")
        return text

    def from_plain(self, value: Any, location: str) -> Any:
        """Read a value of hand-written YAML, which may confuse strings, numbers and booleans."""
        if isinstance(value, (list, dict)):
            raise self._type_error(value, location)
        if isinstance(value, bool):
            if self.element is bool:
                return value
            word = "on" if value else "off"  # YAML 1.1 reads a bare on or off as a boolean
            if word not in self.choices:
                raise self._type_error(value, location)
            return word
        if isinstance(value, (int, float)) and self.element is bool:
            if isinstance(value, float) or value not in (0, 1):
                raise self._type_error(value, location)
            return bool(value)
        if isinstance(value, (int, float)):
            number = self._number(value, location)
            return number if self.element in (int, float) else self.from_text(repr(number), location)
        return self.from_text(str(value), location)

    def from_json(self, value: Any, location: str) -> Any:
        """Read a value written by a program, which must have exactly this type and be within the bounds."""
        fits = isinstance(value, _PYTHON_TYPES[self.element]) and (self.element is bool or not isinstance(value, bool))
        if not fits:
            raise self._type_error(value, location)
        number = self._number(value, location) if self.element in (int, float) else value
        self.check_bounds(value, location)
        return _choice(self.choices, value, location) if self.choices else number

    def check_bounds(self, value: Any, location: str) -> None:
        """Check that a number is within the bounds; texts and switches have no bounds."""
        inside = (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        if not inside:
            text = f"{value:_}" if isinstance(value, int) or abs(value) < 1e15 else f"{value:g}"
            raise UserError(f"{location} is {text}; it must be {self.bounds}")

    def _number(self, value: float, location: str) -> float:
        """Convert a number of a document to a 64-bit int or a finite float."""
        try:
            if self.element is float:
                return checked_number(value)
            if isinstance(value, int):
                return checked_whole(value)  # before it is printed, which Python refuses for very long integers
            if self.element is int:
                if not value.is_integer():
                    raise ValueError("is not an integer")
                return checked_whole(int(value))
        except ValueError as error:
            raise UserError(f"{location}: {format_value(value)} {error}") from None
        return value

    def _type_error(self, value: Any, location: str) -> UserError:
        if isinstance(value, (list, dict)):
            return UserError(f"{location}: expected {self.name}, not {format_value(value)}")
        verb = "is neither true nor false" if self.element is bool else f"is not {self.name}"
        return UserError(f"{location}: {format_value(value)} {verb}")


def _choice(choices: Sequence[str], text: str, location: str) -> str:
    for choice in choices:
        if spell(choice) == spell(text):
            return choice
    raise UserError(f"{location}: {shortened(text)!r} is not one of {', '.join(choices)}")
