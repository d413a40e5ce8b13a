"""Notices to the user about awaited islands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from megatron.distributed.store import QUIET_SECONDS


def describe_islands(islands: Sequence[int]) -> str:
    """Names of islands, for people."""
    return f"{'island' if len(islands) == 1 else 'islands'} {', '.join(map(str, islands))}"


class WaitNotice:
    """Notice of the awaited islands, printed once, soon after waiting begins.

    Args:
        purpose: the awaited action, for people.
        seconds: time limit.
        tell: prints a line.
    """

    def __init__(self, purpose: str, seconds: float, tell: Callable[[str], None]) -> None:
        self._purpose, self._seconds, self._tell = purpose, seconds, tell
        self._at: float | None = time.monotonic() + QUIET_SECONDS

    def update(self, missing: Collection[int]) -> None:
        """Print the missing islands, if they have been awaited for a while."""
        if missing and self._at is not None and time.monotonic() > self._at:
            self._at = None
            self._tell(f"waiting for {describe_islands(sorted(missing))} {self._purpose}, {self._seconds:g} s at most")
