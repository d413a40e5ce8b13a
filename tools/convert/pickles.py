"""What is said of files that torch's weights-only loader does not read."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.config.errors import UserError


def unreadable(path: Path, error: Exception) -> UserError:
    """The error in words of our own: torch's own advise to load the file without its safeguard."""
    if isinstance(error, OSError):
        return UserError(f"{path}: {error.strerror or error}")
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named:
        return UserError(
            f"{path}: cannot be read safely: it names {named[1]}, and only tensors and plain values are read; "
            "fetch a file that holds nothing else"
        )
    return UserError(
        f"{path}: cannot be read safely: it is damaged, or holds more than tensors and plain values; fetch it again"
    )
