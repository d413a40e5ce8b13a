"""Numbers written by users: plain ASCII, within the range of machine numbers."""

from __future__ import annotations

import math
import re

LARGEST = (1 << 63) - 1
"""The largest integer that tensors and files can hold."""
MAX_SIZE = 1 << 24
"""Upper limit of sizes of models, vocabularies and runs; the product of any two fits into 64 bits."""
_LONGEST = 64
_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*", re.ASCII)
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(rf"[+-]?({_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})([eE][+-]?[0-9]+)?", re.ASCII)


def read_whole(text: str) -> int:
    """Parses an integer.

    Raises:
        ValueError: when it is no integer; the message follows the text: "is not an integer" or "is too large".
    """
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        raise ValueError("is not an integer")
    if len(text) > _LONGEST:
        raise ValueError("is too large an integer")
    return checked_whole(int(text))


def checked_whole(number: int) -> int:
    """Returns the number if it fits into 64 bits.

    Raises:
        ValueError: when it does not fit; the message is like the message of ``read_whole``.
    """
    if not -LARGEST <= number <= LARGEST:
        raise ValueError("is too large an integer")
    return number


def read_number(text: str) -> float:
    """Parses a finite number.

    Raises:
        ValueError: when it is no finite number; the message follows the text: "is not a number".
    """
    text = text.strip()
    if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        raise ValueError("is not a finite number")
    written = _NUMBER.fullmatch(text)
    if not written:
        raise ValueError("is not a number")
    if len(text) > _LONGEST:
        raise ValueError("has too many digits for a number")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("is too large a number")
    if number == 0.0 and any(digit in written[1] for digit in "123456789"):
        raise ValueError("is so small that it would be 0")
    return number


def checked_number(number: float) -> float:
    """Returns the number as a float, if it is finite.

    Raises:
        ValueError: when it is not finite; the message is like the message of ``read_number``.
    """
    try:
        number = float(number)
    except OverflowError:
        raise ValueError("is too large a number") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number
