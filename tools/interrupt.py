"""Tools that whoever stops them ends in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By which whoever started a program ends it."""


@contextmanager
def stopped_in_order(*, even_ignored: bool = False) -> Iterator[None]:
    """The signals that end a program unwind like Ctrl-C, so that what was begun is removed.

    Args:
        even_ignored: those too that the shell had ignored (nohup; Ctrl-C in the background of a script).
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if even_ignored or signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores those signals; in the main thread, where they arrive."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
