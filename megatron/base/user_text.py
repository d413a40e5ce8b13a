"""Text from and for users: comparing names, suggestions for misspelled names, shortening of long text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Note = Callable[[str], None]
"""Prints a line about a decision, or a setting without effect, to the user."""

_MIN_PREFIX = 4
"""Minimum letters of a name to be considered a prefix of a longer name."""


def spell(name: str) -> str:
    """Canonical form of flag and field names for comparison: hyphens, lower case, no leading dashes."""
    return name.removeprefix("--").replace("_", "-").lower()


def flag_of(name: str) -> str:
    """Flag of a field, given by its name or its dotted path."""
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def nearest(name: str, known_names: Sequence[str], prefix: str = "") -> str:
    """The text "; the nearest is ..." for a misspelled ``name``; empty if no known name is close."""
    import difflib

    spelled = {spell(candidate): candidate for candidate in known_names}
    word = spell(name)
    longer = [candidate for candidate in spelled if candidate.startswith(word) and len(word) >= _MIN_PREFIX]
    words, close = set(re.split(r"[-.]", word)), []
    for near in difflib.get_close_matches(word, list(spelled), cutoff=0.75):
        near_words = set(re.split(r"[-.]", near))
        additional, missing = words - near_words, near_words - words
        # Words may be misspelled, missing or additional, but not replaced by others.
        if not missing or all(difflib.get_close_matches(each, list(missing), cutoff=0.65) for each in additional):
            close.append(near)
    if len(longer) == 1 or (longer and not close):
        close = [min(longer, key=len)]
    return f"; the nearest is {prefix}{spelled[close[0]]}" if close else ""


def shortened(text: str) -> str:
    """A text for a message, truncated to 60 characters."""
    return text if len(text) <= 60 else f"{text[:60]}..."


def format_value(value: Any) -> str:
    """A value of a document for a message, shortened if long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "names and values"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return repr(shortened(value)) if isinstance(value, str) else shortened(repr(value))


def short_names(paths: Sequence[str]) -> list[str]:
    """Short distinct names of files for logs: the fewest trailing path components that tell them apart."""
    path_components = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, path_components), default=0) + 1):
        names = ["/".join(components[-count:]) for components in path_components]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]
