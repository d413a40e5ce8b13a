"""Signals that ask a launcher to end its ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a rank under --exit-signal-handler to save and end."""
_POLL_SECONDS = 1.0


class StopSignals:
    """Passes the first stop signal on to the ranks, as SIGTERM, and leaves them time to save.

    torch handles a second stop signal, and any other signal: it passes the signal on and kills ranks that have not
    ended within --shutdown-timeout. Ranks that ended after a stop signal are not restarted.

    Attributes:
        received: the signal, once it has come.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._told: set[int] = set()
        self._attending = False
        self._ended = threading.Event()

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *problem: object) -> None:
        """Ends the thread; ``same_process`` restores the handlers."""
        self._ended.set()

    def install(self) -> None:
        """Installs the handlers; called each time before ranks are started.

        Raises:
            SignalException: when a signal has come.
        """
        if self.received is not None:
            raise SignalException("stopped", self.received)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        if not self._attending:
            self._attending = True
            threading.Thread(target=self._attend, name="children", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None or not Path("/proc/self/task").exists():
            self.received = signal.Signals(number)
            raise SignalException(f"got {self.received.name}", signal.SIGTERM)
        self.received = signal.Signals(number)
        self._tell()

    def _tell(self) -> None:
        """Asks each child that has not been asked yet to end."""
        for pid in set(children(os.getpid())) - self._told:
            self._told.add(pid)
            try:
                os.killpg(pid, signal.SIGTERM)  # torch gives each rank a process group
            except ProcessLookupError:
                self._told.discard(pid)  # it has ended, or has no group yet

    def _attend(self) -> None:
        """Signals children that were born after the signal, and continues stopped children, for which torch would wait.
        Linux only."""
        while not self._ended.wait(_POLL_SECONDS):
            if self.received is not None:
                self._tell()
            for pid in stopped_and_asked_to_end(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextmanager
def same_process() -> Iterator[None]:
    """Restores signal handlers, environment variables and the logging level afterwards.

    torch's launcher changes handlers and variables, and restores none.
    """
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    variables, level = dict(os.environ), logging.root.manager.disable
    try:
        yield
    finally:
        logging.disable(level)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def children(parent: int) -> list[int]:
    """Process ids of the children of a process's main thread; empty without /proc."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def stopped_and_asked_to_end(parent: int) -> list[int]:
    """Children of a process that are stopped and have a pending SIGTERM."""
    stopped_pids = []
    for pid in children(parent):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            pending_sigterm = int(status["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1
            if status["State"].startswith("T") and pending_sigterm:
                stopped_pids.append(pid)
    return stopped_pids
