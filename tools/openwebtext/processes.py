"""A function in several processes: results in order, and no process that outlives the one that asked."""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context, resource_tracker, util
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Event
from typing import Any, TypeVar

from megatron.config.errors import UserError
from tools.interrupt import SIGNALS

T = TypeVar("T")
R = TypeVar("R")

_CONTEXT = get_context("forkserver")


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Whether it could be done, and the result or the error."""
    try:
        return True, function(*arguments)
    except (UserError, ModuleNotFoundError) as error:
        return False, error
    except MemoryError:
        return False, UserError("a process was out of memory; give fewer --workers")
    except Exception:
        return False, RuntimeError(f"in another process:\n{traceback.format_exc()}")


def _serve(asked: Connection, function: Callable[..., Any], prepare: Callable[..., None] | None, given: Any) -> None:
    """What a process does: it answers until nobody is left to ask."""
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
        self._connection, other = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(other, *work), daemon=True)
        # Signals are for the process that asks, which ends the others; blocked ones stay so in what is started here.
        # The tracker, started with the first process, would unblock them.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process.start()
        except (EOFError, OSError) as error:
            raise UserError(f"a process could not be started ({error}); give fewer --workers") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            other.close()
        self.end = util.Finalize(self, _end, (self._process,), exitpriority=1)

    def ask(self, item: Any) -> Any:
        """The result.

        Raises:
            EOFError, OSError: when the process was killed.
        """
        self._connection.send(item)
        done, result = self._connection.recv()
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
) -> Iterator[R]:
    """Results in the order of the items, of which a few at a time are on their way, however many there are.

    Args:
        function: of a module.
        items: its arguments.
        workers: processes; with 1, all is done in this one.
        prepare, arguments: called once in every process.
        lost: the result for an item at which the process was killed.

    Raises:
        UserError: as the function does; or when a process was killed and there is no ``lost``.
    """
    if workers == 1:
        if prepare is not None:
            prepare(*arguments)
        yield from map(function, items)
        return
    work = (function, prepare, tuple(arguments))
    idle: SimpleQueue[_Worker] = SimpleQueue()
    started: list[_Worker] = []
    ending = Event()

    def start() -> _Worker:
        started.append(_Worker(*work))
        return started[-1]

    def ask(item: T) -> R:
        worker = idle.get()
        try:
            found: R = worker.ask(item)
        except (EOFError, OSError) as error:
            if lost is None or ending.is_set():
                raise UserError("a process was killed (out of memory?); give fewer --workers") from error
            worker.end()
            worker = start()
            found = lost(item)
        finally:
            idle.put(worker)
        return found

    with ThreadPoolExecutor(workers) as pool:  # each thread waits for one process
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                if len(started) < workers:
                    idle.put(start())
                pending.append(pool.submit(ask, item))
                while pending and (pending[0].done() or len(pending) > 4 * workers):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            ending.set()
            for future in pending:
                future.cancel()
            for worker in started:
                worker.end()
