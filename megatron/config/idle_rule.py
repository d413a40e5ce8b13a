"""The form of a rule about settings that have no effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config.run import RunConfig


@dataclass(frozen=True)
class Idle:
    """Fields that have no effect under one condition.

    fields: dotted names.
    holds: whether they have nothing to act on, in a resolved run of so many processes.
    why: the words behind "no effect".
    """

    fields: tuple[str, ...]
    holds: Callable[[RunConfig, int], bool]
    why: str


def fields_of(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())
