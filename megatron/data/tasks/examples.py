"""Labelled samples as texts: what the readers of task files return."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A labelled sample.

    Args:
        sequences: what the model reads: a text, or a text and another one that belongs to it (else None). A choice has
            several of them.
        label: number of the class or of the right sequence; a float where a number is to be found.
    """

    sequences: tuple[tuple[str, str | None], ...]
    label: int | float


@dataclass(frozen=True)
class ExampleFile:
    """The samples of a file or folder.

    Args:
        path: as it was given.
        examples: its samples, in order.
        note: what was left out; empty for nothing.
    """

    path: str
    examples: Sequence[Example]
    note: str = ""


def clean_text(text: str) -> str:
    """A text with single spaces, and none before a period in its middle, as Megatron's tasks read it."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text
