"""Digest of the package's code."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

import megatron


@cache
def code_digest() -> str:
    """SHA-256 of the package's modules, as they are at the first call."""
    digest = sha256()
    for folder in megatron.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
