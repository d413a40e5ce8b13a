"""Ordered parallel map over processes that never outlive their parent."""

from __future__ import annotations

import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from threading import Thread, get_ident
from typing import Any, TypeVar

from megatron.base.errors import UserError
from megatron.data.interrupt import SIGNALS

T = TypeVar("T")
R = TypeVar("R")

_CONTEXT = get_context("forkserver")

_MOMENT = 0.1
"""Maximum delay of a signal, and polling interval while waiting for a result, in seconds."""


class ProcessKilled(UserError):
    """Raised when a worker process was killed, usually by the out-of-memory killer."""


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Calls ``function``; returns whether it succeeded, and its result or error."""
    try:
        return True, function(*arguments)
    except (UserError, ModuleNotFoundError, OSError) as error:
        return False, error
    except MemoryError:
        return False, UserError("a process was out of memory; give fewer --workers")
    except Exception:
        return False, RuntimeError(f"in another process:\n{traceback.format_exc()}")


_own: dict[str, Any] = {}
"""State of a worker process, set at startup."""


def _begin(
    lifeline: Connection, function: Callable[..., Any], prepare: Callable[..., None] | None, arguments: Any
) -> None:
    """Initializes a worker process; signals to the process group are left to the parent."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    _own["function"] = function
    _own["ready"] = (True, None) if prepare is None else _attempt(prepare, *arguments)


def _end_with(lifeline: Connection) -> None:
    """Ends this process when the other end of the pipe is closed, by the parent or by its death."""
    lifeline.poll(None)
    os._exit(1)


def _answer(item: Any) -> tuple[bool, Any]:
    ready: tuple[bool, Any] = _own["ready"]
    return _attempt(_own["function"], item) if ready[0] else ready


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Blocks signals in this thread, and in threads and processes started from it.

    An exception raised by a signal handler while the thread holds a lock would leave the lock held forever.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


class _Worker:
    """A worker process that handles a single item at a time for its thread.

    With a single-process executor, the item at which the process was killed is known immediately. (An executor with
    several processes may miss the death of the process that it started last.)
    """

    def __init__(self, work: Sequence[Any]) -> None:
        child_end, self._lifeline = _CONTEXT.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(1, _CONTEXT, _begin, (child_end, *work))
        self._results: Any = self._executor._result_queue

    def ask(self, item: Any) -> tuple[bool, Any]:
        """Processes an item; returns whether it succeeded, and the result or error.

        Raises:
            BrokenProcessPool: when the process was killed.
        """
        try:
            future = self._executor.submit(_answer, item)
        except (EOFError, OSError) as error:
            raise UserError(f"a process could not be started ({error}); give fewer --workers") from error
        # The process has its copy of this pipe end by now. With this copy open, the executor would wait forever for the
        # remainder of a result if the process was killed while sending it.
        self._results._writer.close()
        return future.result()

    def end(self) -> None:
        """Ends the process, even in the middle of an item."""
        self._lifeline.close()
        self._executor.shutdown(wait=False)


class _Crew:
    """A thread pool with a process per thread.

    Args:
        workers: number of threads.
        work: function of the processes, initializer, and arguments of the initializer.
        lost, idle: as in ``in_processes``.
    """

    def __init__(
        self, workers: int, work: Sequence[Any], lost: Callable[[Any], Any] | None, idle: Callable[[], None]
    ) -> None:
        self._work, self._lost, self._idle = work, lost, idle
        resource_tracker.ensure_running()  # starting it later, with a process, would unblock signals
        self._threads = ThreadPoolExecutor(workers)
        self._given: deque[Future[Any]] = deque()
        self._workers: dict[int, _Worker] = {}
        self._killed: ProcessKilled | None = None
        self._ending = False

    def give(self, item: Any) -> None:
        with _signals_wait():
            self._given.append(self._threads.submit(self._do, item))

    def take(self, most: int) -> Iterator[Any]:
        """Yields the next results in order until at most ``most`` items are in flight."""
        while self._given:
            has_room = len(self._given) <= most
            with _signals_wait():
                is_done = bool(wait([self._given[0]], 0.0 if has_room else _MOMENT).done)
            if self._killed is not None:
                raise self._killed
            if is_done:
                with _signals_wait():
                    result = self._given.popleft().result()
                yield result
            elif has_room:
                return
            else:
                self._idle()

    def end(self) -> None:
        """Ends all processes, even in the middle of an item."""
        with _signals_wait():
            self._ending = True
            for worker in list(self._workers.values()):
                worker.end()
            self._threads.shutdown(cancel_futures=True)

    def _do(self, item: Any) -> Any:
        """Result of an item; runs in a pool thread."""
        thread = get_ident()
        if thread not in self._workers:
            self._workers[thread] = _Worker(self._work)
        if self._ending:  # a worker created after ``end`` must end itself
            self._workers[thread].end()
        try:
            succeeded, result = self._workers[thread].ask(item)
        except BrokenProcessPool as error:
            self._workers.pop(thread).end()
            if self._lost is not None:
                return self._lost(item)
            self._killed = ProcessKilled("a process was killed (out of memory?); give fewer --workers")
            raise self._killed from error
        if not succeeded:
            raise result
        return result


def in_processes(
    function: Callable[[T], R],
    items: Iterable[T],
    workers: int,
    prepare: Callable[..., None] | None = None,
    arguments: Sequence[Any] = (),
    lost: Callable[[T], R] | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[R]:
    """Maps a function over items in parallel; yields results in order, with a bounded number of items in flight.

    Args:
        function: picklable function of a module.
        items: arguments of the calls.
        workers: number of processes; 1 runs everything in this process.
        prepare, arguments: initializer and its arguments, called once per process.
        lost: returns the result for an item whose process was killed.
        idle: called periodically while waiting for a result.

    Raises:
        UserError, OSError: from the function.
        ProcessKilled: when a process was killed and ``lost`` is None.
    """
    if workers == 1:
        if prepare is not None:
            prepare(*arguments)
        yield from map(function, items)
        return
    crew = _Crew(workers, (function, prepare, tuple(arguments)), lost, idle)
    try:
        for item in items:
            crew.give(item)
            yield from crew.take(4 * workers)
        yield from crew.take(0)
    finally:
        crew.end()
