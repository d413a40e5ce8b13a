"""A function in several processes: results in order, and no process that outlives the one that asked."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process, resource_tracker, util
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from megatron.base.errors import UserError
from megatron.data.interrupt import SIGNALS

T = TypeVar("T")
R = TypeVar("R")

_CONTEXT = get_context("forkserver")

_MOMENT = 0.1
"""Seconds after which whoever waits for a result looks around."""


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


def _end_with_parent() -> None:
    """Ends this process when the one that asks has gone, whatever either is at."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(asked: Connection, function: Callable[..., Any], prepare: Callable[..., None] | None, given: Any) -> None:
    """Answers until nobody is left to ask; what a process does."""
    Thread(target=_end_with_parent, daemon=True).start()
    ready = (True, None) if prepare is None else _attempt(prepare, *given)
    with suppress(EOFError, OSError):
        while True:
            item = asked.recv()
            asked.send(_attempt(function, item) if ready[0] else ready)


def _end(process: Any) -> None:
    process.kill()
    process.join()


class _Worker:
    """A process that is asked one thing at a time.

    It alone holds the other end of the connection, so that each side sees at once when the other one has gone,
    whatever ended it.
    """

    def __init__(self, *work: Any) -> None:
        try:
            self._connection, other = _CONTEXT.Pipe()
            with other:
                self._process = _CONTEXT.Process(target=_serve, args=(other, *work))  # which may have some itself
                self._process.start()
        except (EOFError, OSError) as error:
            raise UserError(f"a process could not be started ({error}); give fewer --workers") from error
        self.end = util.Finalize(self, _end, (self._process,), exitpriority=1)

    def ask(self, item: Any) -> tuple[bool, Any]:
        """Whether it could be done, and the result or the error.

        Raises:
            EOFError, OSError: when the process was killed.
        """
        self._connection.send(item)
        answer: tuple[bool, Any] = self._connection.recv()
        return answer

    def close(self) -> None:
        """Lets go of a process that has been killed; for the thread that asks it."""
        self.end()
        self._connection.close()


class _Crew:
    """Threads with a process each, which they start and ask.

    Signals are for the thread that gives them work: their own block them, and so does what is started there. The
    exception that a signal raises may leave a lock taken, so that thread shares none with them but the queues', which
    are written in C.

    Args:
        work: the function of the processes, what prepares it, and its arguments.
        lost: as in ``in_processes``.
    """

    def __init__(self, work: Sequence[Any], lost: Callable[[Any], Any] | None) -> None:
        self._work = work
        self._lost = lost
        self.asked: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self.found: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._ready: dict[int, tuple[Any, BaseException | None]] = {}
        self._given = self._taken = 0
        self._ending = Event()
        self._threads: list[Thread] = []
        self._workers: list[_Worker] = []
        resource_tracker.ensure_running()  # started with a process, it would no longer block what its thread does

    def give(self, item: Any, workers: int) -> None:
        """Gives an item to the threads, which are one more for each of the first items, ``workers`` at most."""
        if self._given < workers:
            self._grow()
        self.asked.put((self._given, item))
        self._given += 1

    def take(self, most: int, idle: Callable[[], None]) -> Iterator[Any]:
        """The results that are next in order, until at most so many items are on their way."""
        while self._taken < self._given:
            while not self.found.empty() or (self._taken not in self._ready and self._given - self._taken > most):
                try:
                    number, *answer = self.found.get(timeout=_MOMENT)
                except Empty:
                    idle()
                else:
                    if isinstance(answer[1], ProcessKilled):
                        raise answer[1]
                    self._ready[number] = (answer[0], answer[1])
            if self._taken not in self._ready:
                return
            result, error = self._ready.pop(self._taken)
            self._taken += 1
            if error is not None:
                raise error
            yield result

    def _grow(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            thread = Thread(target=self._main, daemon=True)
            thread.start()
            self._threads.append(thread)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end(self) -> None:
        """Ends all, whatever they are at."""
        self._ending.set()
        for worker in list(self._workers):
            worker.end()
        for _ in self._threads:
            self.asked.put(None)
        for thread in self._threads:
            thread.join()

    def _main(self) -> None:
        worker: _Worker | None = None
        while (asked := self.asked.get()) is not None:
            number, item = asked
            try:
                if worker is None:
                    worker = _Worker(*self._work)
                    self._workers.append(worker)
                if self._ending.is_set():  # after that, or else nobody would end it
                    break
                done, result = worker.ask(item)
                self.found.put((number, result, None) if done else (number, None, result))
            except (EOFError, OSError) as error:
                if worker is not None:
                    worker.close()
                    self._workers.remove(worker)
                    worker = None
                if self._lost is None:
                    killed = ProcessKilled("a process was killed (out of memory?); give fewer --workers")
                    killed.__cause__ = error
                    self.found.put((number, None, killed))
                else:
                    self.found.put((number, self._lost(item), None))
            except BaseException as error:
                self.found.put((number, None, error))


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
    crew = _Crew((function, prepare, tuple(arguments)), lost)
    try:
        for item in items:
            crew.give(item, workers)
            yield from crew.take(4 * workers, idle)
        yield from crew.take(0, idle)
    finally:
        crew.end()
