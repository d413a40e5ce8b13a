"""Failures of the network or of a peer."""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """A collective or a message failed. The message is one line naming the operation and the ranks in it."""


class LaunchError(CommunicationError):
    """What the launcher said cannot be: one line naming the environment variable."""
