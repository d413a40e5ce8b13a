"""Handles of pending collectives: torch's, or those of calls in a thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Work(Protocol):
    """A handle that ``Pending`` waits for: torch's, or that of a call in a thread."""

    def wait(self) -> object:
        """Wait until the operation is done; raise RuntimeError if it failed."""

    def is_completed(self) -> bool:
        """Whether ``wait`` would not block."""


class JointWork:
    """Joint handle of several operations.

    A gloo message reports completion only to a caller of ``wait``. So the first ``is_completed`` starts a thread that
    waits; without such a query there is no thread.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._parts = works
        self._waiting: Future[None] | None = None

    def wait(self) -> None:
        if self._waiting is None:
            self._wait_for_all()
        else:
            self._waiting.result()

    def is_completed(self) -> bool:
        if self._waiting is None:
            self._waiting = Caller("messages").start(self._wait_for_all)
        return self._waiting.done()

    def _wait_for_all(self) -> None:
        for work in self._parts:
            work.wait()


class Caller:
    """Thread for calls that may hang, which run in order. It ends some time after this object is deleted."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon, so that a process can exit while a call hangs or waits for peers.
        threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call behind the earlier calls."""
        done: Future[T] = Future()
        self._calls.put((call, done))
        return done

    def call(self, call: Callable[[], T], seconds: float) -> T:
        """Return the result of a call, or raise its error.

        Raises:
            TimeoutError: when it takes longer, or an earlier call still hangs.
        """
        done = self.start(call)
        if not wait([done], seconds).done:  # result() would raise a TimeoutError of its own before Python 3.11
            raise TimeoutError
        return done.result()


def _run_calls(requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (request := requests.get()) is not None:
        call, done = request
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)
        del request, call, done  # the thread must keep nothing alive while it waits


@dataclass(frozen=True)
class CallWork:
    """The handle of a call of a ``Caller``."""

    done: Future[None]

    def wait(self) -> None:
        self.done.result()

    def is_completed(self) -> bool:
        return self.done.done()
