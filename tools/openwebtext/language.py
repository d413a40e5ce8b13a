"""Which language is it? (py3langid: a naive Bayes classifier over byte n-grams; Lui and Baldwin 2012)"""

from __future__ import annotations

import py3langid

_ENOUGH = 4000
"""Characters that decide."""


def is_language(text: str, language: str) -> bool:
    """Whether a text is in a language (its ISO 639-1 code)."""
    return bool(text.strip()) and bool(py3langid.classify(text[:_ENOUGH])[0] == language)
