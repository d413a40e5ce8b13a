"""Labeled text samples, as returned by the readers of task files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A labeled sample.

    Args:
        sequences: input sequences, each a text and an optional second text (else None); multiple-choice samples have
            several sequences.
        label: index of the class or of the correct sequence; a float for regression.
    """

    sequences: tuple[tuple[str, str | None], ...]
    label: int | float


@dataclass(frozen=True)
class ExampleFile:
    """The samples of a file or folder, in file order, with a note on skipped lines, if any."""

    path: str
    examples: Sequence[Example]
    note: str = ""


def clean_text(text: str) -> str:
    """Normalize white space, and remove spaces before inner periods, as Megatron's tasks do."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text
