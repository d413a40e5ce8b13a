"""Seeds of random numbers, derived from their purpose."""

from __future__ import annotations

import hashlib


def text_number(text: str) -> int:
    """A 63-bit number that stands for a text, equal in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_seed(*names: object) -> int:
    """A 63-bit seed from the purpose of the numbers."""
    return text_number(repr(names))
