"""Iterations that consume samples without a step (``--iterations-to-skip``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import UserError

_WORD = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")


@dataclass(frozen=True)
class SkippedIterations:
    """Sorted, disjoint ranges of iterations, 1-based and inclusive."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> SkippedIterations:
        """Parse numbers and ranges such as "7" and "100-120".

        Raises:
            UserError: when a word is neither.
        """
        pairs = []
        for word in words:
            match = _WORD.fullmatch(word)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
            if not 1 <= first <= last:
                raise UserError(
                    f"--iterations-to-skip {word}: expected iterations from 1 on, or ranges of them such as 100-120"
                )
            pairs.append((first, last))
        ranges: list[tuple[int, int]] = []
        for first, last in sorted(pairs):
            if ranges and first <= ranges[-1][1] + 1:
                ranges[-1] = ranges[-1][0], max(ranges[-1][1], last)
            else:
                ranges.append((first, last))
        return cls(tuple(ranges))

    def __contains__(self, iteration: int) -> bool:
        return any(first <= iteration <= last for first, last in self.ranges)

    def count(self, start: int, done: int) -> int:
        """Number of skipped iterations after iteration ``start``, up to and including iteration ``done``."""
        return sum(max(min(last, done) - max(first - 1, start), 0) for first, last in self.ranges)

    def until(self, done: int) -> int | None:
        """Next iteration count, above ``done``, at which a skipped range begins or ends; None if there is none."""
        ends = (end for first, last in self.ranges for end in (first - 1, last))
        return next((end for end in ends if end > done), None)
