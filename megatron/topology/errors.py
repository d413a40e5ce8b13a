"""Failures of the network or of a peer, and the words in which they are told."""

from __future__ import annotations

from collections.abc import Sequence


class CommunicationError(RuntimeError):
    """A collective or a message failed. The message is one line naming the operation and the ranks in it."""


class LaunchError(CommunicationError):
    """What the launcher said cannot be: one line naming the environment variable."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def ranks_text(ranks: Sequence[int]) -> str:
    """Names some ranks: "rank 3", "ranks 1, 2 and 4 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
