"""Signal handling of tools that must clean up when they are stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user, a shell or a scheduler stops a program."""


@contextmanager
def stopped_in_order(*, even_ignored: bool = False) -> Iterator[None]:
    """Lets the signals that end a program unwind it like Ctrl-C, so that temporary files are removed.

    Args:
        even_ignored: also take signals that the shell had ignored (nohup; Ctrl-C in a script's background).
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    taken = SIGNALS if even_ignored else [one for one in SIGNALS if signal.getsignal(one) == signal.SIG_DFL]
    with _handled(stop, taken):
        yield


def undisturbed() -> AbstractContextManager[None]:
    """Ignores those signals."""
    return _handled(signal.SIG_IGN, SIGNALS)


@contextmanager
def _handled(handler: Callable[..., Any] | signal.Handlers, numbers: Iterable[int]) -> Iterator[None]:
    """Sets signal handlers, in the main thread; other threads may not set any."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
