"""Ends of commands that write whole files or none: stopped by a signal, by bad input, by a full disk."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron.base.errors import UserError

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


def run_command(body: Callable[[], object], name: str = "", stopped: str = "nothing was written") -> int:
    """Runs a command that cleans up when it fails or is stopped; returns its exit status.

    Args:
        body: the command.
        name: name of the command before its line of error; none where there is one command only.
        stopped: state of its output when it fails or is stopped.
    """
    prefix = f"{name}: " if name else ""
    try:
        with stopped_in_order():
            body()
    except UserError as error:
        sys.stderr.write(f"{prefix}error: {error}\n")
        return 2
    except OSError as error:
        place = f"{error.filename or 'output'}: {error.strerror or error}"
        sys.stderr.write(f"{prefix}error: {place}. {stopped[0].upper()}{stopped[1:]}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{prefix}interrupted; {stopped}\n")
        return 130
    return 0


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
