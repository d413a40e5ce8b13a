"""A function in several processes: results in order, and no process that outlives the one that asked."""

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
"""Seconds for which signals wait at most, and after which whoever waits for a result looks around."""


class ProcessKilled(UserError):
    """A process was killed, most often by a system that was out of memory."""


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Whether it could be done, and the result or the error."""
    try:
        return True, function(*arguments)
    except (UserError, ModuleNotFoundError, OSError) as error:
        return False, error
    except MemoryError:
        return False, UserError("a process was out of memory; give fewer --workers")
    except Exception:
        return False, RuntimeError(f"in another process:\n{traceback.format_exc()}")


_own: dict[str, Any] = {}
"""State of a worker process, set once when it starts."""


def _begin(lifeline: Connection, function: Callable[..., Any], prepare: Callable[..., None] | None, given: Any) -> None:
    """Prepares a worker process, which leaves signals for its group to the process that asks."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    _own["function"] = function
    _own["ready"] = (True, None) if prepare is None else _attempt(prepare, *given)


def _end_with(lifeline: Connection) -> None:
    """Ends this process when the other end of a pipe has gone: closed by who holds it, or together with that one."""
    lifeline.poll(None)
    os._exit(1)


def _answer(item: Any) -> tuple[bool, Any]:
    ready: tuple[bool, Any] = _own["ready"]
    return _attempt(_own["function"], item) if ready[0] else ready


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Keeps signals from this thread, and from the threads and processes that are started meanwhile.

    The exception that a signal raises would leave a lock taken for ever, if it came while the thread holds one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A process that is asked one thing at a time, by a thread of its own.

    An executor of one process tells at once which item its process was killed at. (One of several may miss that the
    process it started last was killed.)
    """

    def __init__(self, work: Sequence[Any]) -> None:
        theirs, self._lifeline = _CONTEXT.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(1, _CONTEXT, _begin, (theirs, *work))
        self._results: Any = self._executor._result_queue

    def ask(self, item: Any) -> tuple[bool, Any]:
        """Whether it could be done, and the result or the error.

        Raises:
            BrokenProcessPool: when the process was killed.
        """
        try:
            future = self._executor.submit(_answer, item)
        except (EOFError, OSError) as error:
            raise UserError(f"a process could not be started ({error}); give fewer --workers") from error
        # The process has its own end of this pipe by now. With this one open, the executor would wait for ever for the
        # rest of a result in the middle of which the process was killed.
        self._results._writer.close()
        return future.result()

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        self._lifeline.close()
        self._executor.shutdown(wait=False)


class _Crew:
    """Threads with a process each.

    Args:
        workers: their number.
        work: the function of the processes, what prepares it, and its arguments.
        lost, idle: as in ``in_processes``.
    """

    def __init__(
        self, workers: int, work: Sequence[Any], lost: Callable[[Any], Any] | None, idle: Callable[[], None]
    ) -> None:
        self._work, self._lost, self._idle = work, lost, idle
        resource_tracker.ensure_running()  # started with a process, it would let signals through there
        self._threads = ThreadPoolExecutor(workers)
        self._given: deque[Future[Any]] = deque()
        self._workers: dict[int, _Worker] = {}
        self._killed: ProcessKilled | None = None
        self._ending = False

    def give(self, item: Any) -> None:
        with _signals_wait():
            self._given.append(self._threads.submit(self._do, item))

    def take(self, most: int) -> Iterator[Any]:
        """The results that are next in order, until at most so many items are on their way."""
        while self._given:
            enough = len(self._given) <= most
            with _signals_wait():
                done = bool(wait([self._given[0]], 0.0 if enough else _MOMENT).done)
            if self._killed is not None:
                raise self._killed
            if done:
                with _signals_wait():
                    result = self._given.popleft().result()
                yield result
            elif enough:
                return
            else:
                self._idle()

    def end(self) -> None:
        """Ends all, whatever they are at."""
        with _signals_wait():
            self._ending = True
            for worker in list(self._workers.values()):
                worker.end()
            self._threads.shutdown(cancel_futures=True)

    def _do(self, item: Any) -> Any:
        """The result for an item; runs in one of the threads."""
        thread = get_ident()
        if thread not in self._workers:
            self._workers[thread] = _Worker(self._work)
        if self._ending:  # after that, or else nobody would end it
            self._workers[thread].end()
        try:
            done, result = self._workers[thread].ask(item)
        except BrokenProcessPool as error:
            self._workers.pop(thread).end()
            if self._lost is not None:
                return self._lost(item)
            self._killed = ProcessKilled("a process was killed (out of memory?); give fewer --workers")
            raise self._killed from error
        if not done:
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
    """Results in the order of the items, of which a few at a time are on their way, however many there are.

    Args:
        function: of a module.
        items: its arguments.
        workers: processes; with 1, all is done in this one.
        prepare, arguments: called once in every process.
        lost: the result for an item at which the process was killed.
        idle: called now and then while a result is waited for.

    Raises:
        UserError, OSError: as the function does.
        ProcessKilled: when a process was killed and there is no ``lost``.
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
