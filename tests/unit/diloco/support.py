"""Islands in threads of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron.diloco.membership import Islands
from megatron.diloco.round_decision import Vote

GOOD = Vote(failed=False, mean_norm=1.0, usual_norm=1.0)
T = TypeVar("T")
MakeIslands = Callable[..., list[Islands]]
"""(count, quorum, numbers, seconds, start_seconds, tell) -> islands of all or the given numbers.

They leave after the test.
"""


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at the same time; return their results or exceptions."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def each(items: Sequence[T], call: Callable[[T], Any]) -> list[Any]:
    """Call a function on all items at the same time."""
    return together(*(lambda item=item: call(item) for item in items))
