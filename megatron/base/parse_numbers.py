"""Numbers written by users: plain ASCII, within the range of machine numbers."""

from __future__ import annotations

import math
import re

MAX_INTEGER = (1 << 63) - 1
"""The largest integer that tensors and files can hold."""
MAX_SIZE = 1 << 24
"""Upper limit of sizes of models, vocabularies and runs; the product of any two fits into 64 bits."""
_MAX_CHARACTERS = 64
_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*", re.ASCII)
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(rf"[+-]?({_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})([eE][+-]?[0-9]+)?", re.ASCII)


def read_whole(text: str) -> int:
    """Parse an integer.

    Raises:
        ValueError: when it is not an integer or too large; the message is a predicate: "is not an integer".
    """
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        raise ValueError("is not an integer")
    if len(text) > _MAX_CHARACTERS:
        raise ValueError("is too large an integer")
    return checked_whole(int(text))


def checked_whole(number: int) -> int:
    """Return the number if it fits into 64 bits.

    Raises:
        ValueError: when it does not fit; the message is a predicate, as for ``read_whole``.
    """
    if not -MAX_INTEGER <= number <= MAX_INTEGER:
        raise ValueError("is too large an integer")
    return number


def read_number(text: str) -> float:
    """Parse a finite number.

    Raises:
        ValueError: when it is not a finite number; the message is a predicate: "is not a number".
    """
    text = text.strip()
    if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        raise ValueError("is not a finite number")
    match = _NUMBER.fullmatch(text)
    if not match:
        raise ValueError("is not a number")
    if len(text) > _MAX_CHARACTERS:
        raise ValueError("has too many digits for a number")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("is too large a number")
    if number == 0.0 and any(digit in match[1] for digit in "123456789"):
        raise ValueError("is so small that it would be 0")
    return number


def checked_number(number: float) -> float:
    """Return the number as a float, if it is finite.

    Raises:
        ValueError: when it is not finite; the message is a predicate, as for ``read_number``.
    """
    try:
        number = float(number)
    except OverflowError:
        raise ValueError("is too large a number") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number
