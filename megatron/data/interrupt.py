"""Clean exits for commands that write complete files or none: on signals, bad input or a full disk."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron.base.errors import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals with which a user, shell or scheduler stops a program."""


@contextmanager
def interrupt_on_signals(*, even_ignored: bool = False) -> Iterator[None]:
    """Turn termination signals into KeyboardInterrupt, so that temporary files are removed.

    Args:
        even_ignored: also handle signals that the shell ignores (nohup; Ctrl-C in a background job).
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handled_signals = (
        SIGNALS if even_ignored else [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    )
    with _set_handlers(stop, handled_signals):
        yield


def run_command(body: Callable[[], object], name: str = "", stopped: str = "nothing was written") -> int:
    """Run a command and return its exit status; print a single line if it fails or is interrupted.

    Args:
        body: the command.
        name: prefix of the error line; empty for no prefix.
        stopped: state of the output after a failure or an interrupt, for the message.
    """
    prefix = f"{name}: " if name else ""
    try:
        with interrupt_on_signals():
            body()
    except UserError as error:
        sys.stderr.write(f"{prefix}error: {error}\n")
        return 2
    except OSError as error:
        reason = f"{error.filename or 'output'}: {error.strerror or error}"
        sys.stderr.write(f"{prefix}error: {reason}. {stopped[0].upper()}{stopped[1:]}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{prefix}interrupted; {stopped}\n")
        return 130
    return 0


def ignore_signals() -> AbstractContextManager[None]:
    """Ignore termination signals."""
    return _set_handlers(signal.SIG_IGN, SIGNALS)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay termination signals to the end of the context: an exception could leave a library's lock acquired."""
    received = list[int]()
    try:
        with _set_handlers(lambda number, _: received.append(number), SIGNALS):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextmanager
def _set_handlers(handler: Callable[..., Any] | signal.Handlers, numbers: Iterable[int]) -> Iterator[None]:
    """Set signal handlers; do nothing outside the main thread, where Python does not allow it."""
    old_handlers = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                old_handlers[number] = signal.getsignal(number)
                signal.signal(number, handler)
        yield
    finally:
        for number, old_handler in old_handlers.items():
            signal.signal(number, old_handler)
