"""Handles of several operations, whose parts do not tell whether they are done before they are waited for."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.distributed.work import Together


class _Message:
    """Like gloo's: it can be waited for once."""

    def __init__(self, fails: bool = False) -> None:
        self.come, self.fails, self.waits = threading.Event(), fails, 0

    def wait(self) -> None:
        self.waits += 1
        assert self.waits == 1
        assert self.come.wait(10)
        if self.fails:
            raise RuntimeError("the peer is gone")

    def is_completed(self) -> bool:
        return False


def _soon(both: Together) -> bool:
    deadline = time.monotonic() + 10
    while not both.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return both.is_completed()


def test_who_asks_learns_that_all_have_come() -> None:
    first, second = _Message(), _Message()
    both = Together((first, second))
    assert not both.is_completed()
    second.come.set()
    assert not both.is_completed()
    first.come.set()
    assert _soon(both)
    both.wait()
    assert first.waits == second.waits == 1


def test_a_failure_is_raised_by_wait() -> None:
    message = _Message(fails=True)
    both = Together((message,))
    message.come.set()
    assert _soon(both)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        both.wait()


def test_nobody_asks() -> None:
    message = _Message()
    message.come.set()
    threads = threading.active_count()
    Together((message,)).wait()
    assert threading.active_count() == threads
    assert message.waits == 1
