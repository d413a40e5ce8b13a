"""Language identification with py3langid, a naive Bayes classifier over byte n-grams (Lui and Baldwin 2012)."""

from __future__ import annotations

from megatron.base.errors import UserError

_ENOUGH = 4000
"""Number of characters passed to the classifier."""


def is_language(text: str, language: str) -> bool:
    """Return whether a text is in a language (its ISO 639-1 code)."""
    import py3langid

    return bool(text.strip()) and bool(py3langid.classify(text[:_ENOUGH])[0] == language)


def check_language(language: str) -> None:
    """Check a language code.

    Raises:
        UserError: when the classifier does not know the language.
    """
    import py3langid

    known_languages = sorted({code for code, _ in py3langid.rank("")})
    if language not in known_languages:
        raise UserError(f"--language {language} is not known; choose from {', '.join(known_languages)}")
