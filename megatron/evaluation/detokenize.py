"""Undoes the tokenization that WikiText was published with, so that a model reads text as it is usually written."""

from __future__ import annotations

import re

_PLAIN = (
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
"""Numbers and words taken apart, and marks set off."""

_PAIRS = tuple(
    (re.compile(rf"{opening}\s*([^{inside}]*?)\s*{closing}"), rf"{left}\1{right}")
    for opening, inside, closing, left, right in (
        (r"\(", r"\)", r"\)", "(", ")"),
        (r"\[", r"\]", r"\]", "[", "]"),
        (r"\{", r"\}", r"\}", "{", "}"),
        ('"', '"', '"', '"', '"'),
        ("'", "'", "'", "'", "'"),
    )
)
"""Space inside brackets and quotation marks."""

_LATER = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
"""Headings, degrees, the ends of lines, numbers left out, and the genitive."""


def wikitext(text: str) -> str:
    """Detokenizes WikiText, by the rules behind published perplexities of Megatron models."""
    text = text.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for old, new in _PLAIN:
        text = text.replace(old, new)
    for pattern, replacement in _PAIRS:
        text = pattern.sub(replacement, text)
    for old, new in _LATER:
        text = text.replace(old, new)
    return text
