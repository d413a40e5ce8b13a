"""Sequence length of each step: constant, or growing (a curriculum)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LengthSchedule:
    """Sequence length of each step, as a pure function of its iteration (0-based).

    Args:
        lengths: ascending lengths; the last holds until the end.
        first: first iteration of each length, ascending from 0.
    """

    lengths: tuple[int, ...]
    first: tuple[int, ...]

    @staticmethod
    def constant(length: int) -> LengthSchedule:
        """Schedule with the same length at every step."""
        return LengthSchedule((length,), (0,))

    @staticmethod
    def growing(length_of: Callable[[int], int], steps: int, full: int) -> LengthSchedule:
        """Tabulate a function of the step number.

        Args:
            length_of: length of step 1, 2, ..., ``steps``; non-decreasing and at most ``full``.
            steps: number of steps to tabulate.
            full: length of all later steps.
        """
        lengths, first, step = [], [], 1
        while step <= steps:
            lengths.append(length_of(step))
            first.append(step - 1)
            # There are many more steps than lengths: search for the next change.
            step += bisect_right(range(step, steps + 1), lengths[-1], key=length_of)
        if not lengths or lengths[-1] < full:
            lengths.append(full)
            first.append(steps)
        return LengthSchedule(tuple(lengths), tuple(first))

    def at(self, iteration: int) -> int:
        """Length of a step."""
        return self.lengths[self._index(iteration)]

    def until(self, iteration: int) -> int | None:
        """Next iteration with another length; None if there is none."""
        following = self._index(iteration) + 1
        return self.first[following] if following < len(self.first) else None

    def _index(self, iteration: int) -> int:
        return bisect_right(self.first, iteration) - 1

    @property
    def full(self) -> int:
        """Last and longest length."""
        return self.lengths[-1]

    @property
    def grows(self) -> bool:
        """Whether there is more than one length."""
        return len(self.lengths) > 1
