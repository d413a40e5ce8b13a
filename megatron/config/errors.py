"""The one error type that a user is meant to read."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: a flag, a file, a checkpoint, a peer.

    The message is one line that says what is wrong, where, and what to do. Entry points print it without a
    traceback and exit non-zero on every rank.
    """
