"""Seeds of random numbers, derived from their purpose."""

from __future__ import annotations

import hashlib


def hash_text(text: str) -> int:
    """A 63-bit hash of a text, equal in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_seed(*names: object) -> int:
    """A 63-bit seed from the purpose of the numbers."""
    return hash_text(repr(names))
