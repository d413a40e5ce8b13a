"""Detokenization of WikiText, which is published with spaces around punctuation."""

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
"""Split numbers and words, and spaces around punctuation marks."""

_PAIRS = tuple(
    (re.compile(rf"{opening}\s*([^{inside}]*?)\s*{closing}"), rf"{opening_text}\1{closing_text}")
    for opening, inside, closing, opening_text, closing_text in (
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
"""Headings, degrees, line ends, placeholders of numbers, and the possessive."""


def wikitext(text: str) -> str:
    """Detokenize WikiText with the rules used for published perplexities of Megatron models."""
    text = text.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for old, new in _PLAIN:
        text = text.replace(old, new)
    for pattern, replacement in _PAIRS:
        text = pattern.sub(replacement, text)
    for old, new in _LATER:
        text = text.replace(old, new)
    return text
