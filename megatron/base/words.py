"""Words of and for users: how names are compared, the known name nearest to a misspelled one, long texts cut short."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Note = Callable[[str], None]
"""Takes a line that tells the user what was decided, or what has no effect."""

_SHORT = 3
"""Letters of a name that is too short to be the beginning of another."""


def spell(name: str) -> str:
    """The form in which flag and field names are compared: hyphens, lower case, without the two leading dashes."""
    return name.removeprefix("--").replace("_", "-").lower()


def nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """The words "; the nearest is ..." for a misspelled ``name``, or nothing when no known name is near."""
    import difflib

    spelled = {spell(candidate): candidate for candidate in known}
    word = spell(name)
    longer = [candidate for candidate in spelled if candidate.startswith(word) and len(word) > _SHORT]
    close = [
        near for near in difflib.get_close_matches(word, list(spelled), cutoff=0.75) if _differ_by_typos(word, near)
    ]
    if len(longer) == 1 or (longer and not close):
        close = [min(longer, key=len)]
    return f"; the nearest is {prefix}{spelled[close[0]]}" if close else ""


def _differ_by_typos(name: str, other: str) -> bool:
    """Whether two names differ by misspelled, missing or additional words only, not by another word in place of one."""
    import difflib

    words, others = (set(re.split(r"[-.]", text)) for text in (name, other))
    odd, other_odd = words - others, others - words
    return (
        not odd or not other_odd or all(difflib.get_close_matches(word, list(other_odd), cutoff=0.65) for word in odd)
    )


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


def short_names(paths: Sequence[str]) -> list[str]:
    """Names of files in logs: the last parts of their paths, as many as tell them apart."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, 1)]
