"""The error type whose message is meant for users, and what it quotes of others."""

from __future__ import annotations

_LONGEST = 20_000


class UserError(ValueError):
    """Bad input: a flag, a file, a checkpoint, a peer.

    The message is one line that says what is wrong, where, and what to do. Entry points print it without a
    traceback and exit non-zero on every rank.
    """

    def __init__(self, message: str = "") -> None:
        text = " ".join(message.splitlines())  # what it quotes may have several
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
