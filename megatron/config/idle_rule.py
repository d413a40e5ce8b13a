"""Rule for settings without effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config.run import RunConfig


@dataclass(frozen=True)
class Idle:
    """Fields that have no effect under a condition.

    fields: dotted names.
    holds: the condition, on the resolved configuration and the world size.
    why: text after "no effect" in the note.
    """

    fields: tuple[str, ...]
    holds: Callable[[RunConfig, int], bool]
    why: str


def fields_of(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())
