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
    """Handlers that forward the first stop signal to the ranks, as SIGTERM, and leave them time to save.

    torch handles a second stop signal, and any other signal: it forwards the signal and kills ranks that have not
    exited within --shutdown-timeout. Ranks that exited after a stop signal are not restarted.

    Attributes:
        received: the first stop signal; None before it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._signaled: set[int] = set()
        self._watching = False
        self._ended = threading.Event()

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *problem: object) -> None:
        """Stop the thread; ``restore_process_state`` restores the handlers."""
        self._ended.set()

    def install(self) -> None:
        """Install the handlers; called each time before ranks are started.

        Raises:
            SignalException: when a stop signal was received.
        """
        if self.received is not None:
            raise SignalException("stopped", self.received)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch_children, name="children", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None or not Path("/proc/self/task").exists():
            self.received = signal.Signals(number)
            raise SignalException(f"got {self.received.name}", signal.SIGTERM)
        self.received = signal.Signals(number)
        self._signal_children()

    def _signal_children(self) -> None:
        """Forward the signal to each child that has not received it."""
        for pid in set(list_children(os.getpid())) - self._signaled:
            self._signaled.add(pid)
            try:
                os.killpg(pid, signal.SIGTERM)  # torch gives each rank a process group
            except ProcessLookupError:
                self._signaled.discard(pid)  # it has exited, or has no group yet

    def _watch_children(self) -> None:
        """Signal children started after the signal, and continue stopped children, for which torch would wait (Linux
        only)."""
        while not self._ended.wait(_POLL_SECONDS):
            if self.received is not None:
                self._signal_children()
            for pid in list_stopped_children(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restore signal handlers, environment variables and the logging level afterwards: torch's launcher does not."""
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


def list_children(parent: int) -> list[int]:
    """Process ids of the children of a process's main thread; empty without /proc."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def list_stopped_children(parent: int) -> list[int]:
    """Process ids of children that are stopped and have a pending SIGTERM."""
    stopped_pids = []
    for pid in list_children(parent):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            pending_sigterm = int(status["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1
            if status["State"].startswith("T") and pending_sigterm:
                stopped_pids.append(pid)
    return stopped_pids
