"""Values of documents written by programs, type-checked on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.base.errors import UserError
from megatron.base.parse_numbers import MAX_SIZE
from megatron.base.user_text import format_value
from megatron.base.value_type import ValueType


class Values(Mapping[str, Any]):
    """Names and values; None counts as missing.

    Every typed accessor raises UserError when the value is missing without a default, or has another type.

    Args:
        content: content of a document.
        location: name of the document in messages; empty if the caller adds it.
        remedy: end of messages, with the remedy for a bad value.
    """

    def __init__(self, content: Mapping[str, Any], location: str = "", remedy: str = "") -> None:
        self._content = content
        self.location = location
        self._remedy = remedy

    def __getitem__(self, name: str) -> Any:
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def has(self, name: str) -> bool:
        """Whether the name has a value other than None."""
        return self._content.get(name) is not None

    def integer(
        self, name: str, default: int | None = None, *, minimum: int | None = 1, maximum: int | None = MAX_SIZE
    ) -> int:
        """An integer in a range."""
        return int(self._read_value(name, default, ValueType(element=int, minimum=minimum, maximum=maximum)))

    def number(
        self, name: str, default: float | None = None, *, minimum: float | None = None, maximum: float | None = None
    ) -> float:
        """A finite number in a range."""
        return float(self._read_value(name, default, ValueType(element=float, minimum=minimum, maximum=maximum)))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A boolean."""
        return bool(self._read_value(name, default, ValueType(element=bool)))

    def text(self, name: str, default: str | None = None) -> str:
        """A text."""
        return str(self._read_value(name, default, ValueType(element=str)))

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        return [self._fit(ValueType(element=str), item, name) for item in self.listed(name)]

    def integers(self, name: str) -> list[int]:
        """A list of integers."""
        return [self._fit(ValueType(element=int), item, name) for item in self.listed(name)]

    def listed(self, name: str) -> list[Any]:
        """A list of unchecked values."""
        return list(self._of_type(name, None, list, "a list"))

    def table(self, name: str, default: Mapping[str, Any] | None = None) -> Values:
        """Nested names and values, with the same location and remedy."""
        return Values(self._of_type(name, default, Mapping, "names and values"), self.location, self._remedy)

    def wrong(self, problem: str) -> UserError:
        """An error for a bad value, with the document's name and the remedy."""
        label, remedy = f"{self.location}: " if self.location else "", f"; {self._remedy}" if self._remedy else ""
        return UserError(f"{label}{problem}{remedy}")

    def _read_value(self, name: str, default: Any, value_type: ValueType) -> Any:
        return (
            self._fit(value_type, self._content[name], name) if self.has(name) else self._require_default(name, default)
        )

    def _require_default(self, name: str, default: Any) -> Any:
        if default is None:
            raise self.wrong(f"{name} is missing")
        return default

    def _fit(self, value_type: ValueType, value: Any, name: str) -> Any:
        try:
            return value_type.from_json(value, name)
        except UserError as error:
            raise self.wrong(str(error)) from None

    def _of_type(self, name: str, default: Any, expected_type: type, description: str) -> Any:
        if not self.has(name):
            return self._require_default(name, default)
        if not isinstance(self._content[name], expected_type):
            raise self.wrong(f"{name}: expected {description}, not {format_value(self._content[name])}")
        return self._content[name]
