"""Words of and for users: how names are compared, the known name nearest to a misspelled one, texts cut short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Note = Callable[[str], None]
"""Takes a line that tells the user what was decided, or what has no effect."""


def spell(name: str) -> str:
    """The form in which flag and field names are compared: hyphens, lower case, without the two leading dashes."""
    return name.removeprefix("--").replace("_", "-").lower()


def nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """The words "; the nearest is ..." for a misspelled ``name``, or nothing when no known name is near."""
    import difflib

    spelled = {spell(candidate): candidate for candidate in known}
    word = spell(name)
    longer = [candidate for candidate in spelled if candidate.startswith(word)]
    close = difflib.get_close_matches(word, list(spelled), n=1, cutoff=0.6)
    if len(longer) == 1 or (longer and not close):
        close = [min(longer, key=len)]
    return f"; the nearest is {prefix}{spelled[close[0]]}" if close else ""


def shortened(text: str, most: int = 60) -> str:
    """A text for a message: its beginning only when it is long."""
    return text if len(text) <= most else f"{text[:most]}..."


def shown(value: Any) -> str:
    """A value of a document for a message, however long it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "names and values"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return repr(shortened(value)) if isinstance(value, str) else shortened(repr(value))
