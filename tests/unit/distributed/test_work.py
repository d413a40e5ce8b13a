"""Handles of several operations that do not know whether they are complete without a wait."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.distributed.work import Caller, JointWork


class _Message:
    """A handle that can be waited for once, like gloo's."""

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


def _completes(work: JointWork) -> bool:
    deadline = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return work.is_completed()


def test_is_completed_is_true_after_all_messages() -> None:
    first, second = _Message(), _Message()
    work = JointWork((first, second))
    assert not work.is_completed()
    second.come.set()
    assert not work.is_completed()
    first.come.set()
    assert _completes(work)
    work.wait()
    assert first.waits == second.waits == 1


def test_a_failure_is_raised_by_wait() -> None:
    message = _Message(fails=True)
    work = JointWork((message,))
    message.come.set()
    assert _completes(work)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        work.wait()


def test_wait_alone_starts_no_thread() -> None:
    message = _Message()
    message.come.set()
    threads = threading.active_count()
    JointWork((message,)).wait()
    assert threading.active_count() == threads
    assert message.waits == 1


def test_a_call_that_hangs_is_a_timeout_of_the_language() -> None:
    """Before Python 3.11, that of futures was another class, which callers do not catch."""
    hangs = threading.Event()
    caller = Caller("test")
    with pytest.raises(TimeoutError) as caught:
        caller.call(hangs.wait, 0.05)
    assert type(caught.value) is TimeoutError
    hangs.set()
    assert caller.call(lambda: 3, 10.0) == 3
