"""Ordered parallel map over the processes of a ``ProcessPoolExecutor``."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, TypeVar

from megatron.base.errors import UserError
from megatron.data.interrupt import delay_signals

T = TypeVar("T")
R = TypeVar("R")

_POLL_SECONDS = 0.1
"""Time between checks of the processes while waiting for a result."""


class ProcessKilled(UserError):
    """Raised when a worker process was killed, usually by the out-of-memory killer, or ran out of memory."""


_worker: dict[str, Any] = {}
"""State of a worker process, set at startup."""


def _start_worker(function: Callable[[Any], Any]) -> None:
    """Initialize a worker process; the parent handles the signals of the terminal, and ends the worker."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()  # the executor's workers would outlive a killed parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes use the cores
    _worker["function"] = function


def _call(item: Any) -> Any:
    return _worker["function"](item)


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def map_in_processes(
    function: Callable[[T], R],
    items: Iterable[T],
    workers: int,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[R]:
    """Map a function over items in parallel; yield results in order, with a bounded number of items in flight.

    Args:
        function: picklable; sent once to each process, where an object may keep state between calls.
        items: arguments of the calls.
        workers: number of processes; 1 runs everything in this process.
        idle: called periodically while waiting for a result.

    Raises:
        ProcessKilled: when a process was killed.
        Exception: from the function.
    """
    if workers == 1:
        yield from map(function, items)
        return
    other_children = set(active_children())
    executor = ProcessPoolExecutor(workers, get_context("forkserver"), _start_worker, (function,))
    result_queue: Any = executor._result_queue
    call_queue: Any = executor._call_queue  # type: ignore[attr-defined]
    processes: set[BaseProcess] = set()
    pending: deque[Future[R]] = deque()

    def pop_results(max_pending: int) -> Iterator[R]:
        while pending:
            is_overfull = len(pending) > max_pending
            with delay_signals():
                done, _ = wait([pending[0]], _POLL_SECONDS if is_overfull else 0)
                results = [pending.popleft().result() for _ in done]
            yield from results
            if results:
                continue
            if not is_overfull:
                return
            idle()
            # The executor may miss the death of the process that it started last.
            if any(process.exitcode is not None for process in processes):
                raise BrokenProcessPool

    try:
        for item in items:
            with delay_signals():
                pending.append(executor.submit(_call, item))
                if len(processes) < workers:  # the executor starts them one by one
                    processes.update(set(active_children()) - other_children)
            yield from pop_results(4 * workers)
        yield from pop_results(0)
    except BaseException as error:
        for process in processes:  # items in progress may take minutes
            process.kill()
        # With this copy of the pipe's end open, the executor would wait forever for the second half of a result.
        result_queue._writer.close()
        # With this one open, a thread of Python before 3.11.5 would wait forever to send an item to killed processes.
        call_queue._reader.close()
        if isinstance(error, (BrokenProcessPool, MemoryError)):
            raise ProcessKilled("a process was killed (out of memory?); give fewer --workers") from error
        raise
    finally:
        with delay_signals():
            executor.shutdown(cancel_futures=True)
