"""Named timers and their report."""

from __future__ import annotations

import pytest

from megatron.distributed.clock import HostClock
from megatron.training.timers import Timers, format_timers


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_intervals_add_up_and_a_report_resets() -> None:
    clock = Clock()
    timers = Timers(level=1, clock=HostClock(clock))
    for _ in range(4):
        with timers("forward-backward", level=1):
            clock.now += 0.25
        clock.now += 9.0
    timers("optimizer", level=0).start()
    clock.now += 0.5
    timers("optimizer").stop()
    times = timers.collect(lambda mine: [mine, [2 * x for x in mine]], iterations=2)
    assert times == {"forward-backward": [500.0, 1000.0], "optimizer": [250.0, 500.0]}
    assert timers.collect(lambda mine: [mine]) == {}
    assert timers.report({}) == ""


def test_timers_above_the_level_do_nothing() -> None:
    clock = Clock()
    timers = Timers(level=1, clock=HostClock(clock))
    with timers("forward-compute", level=2), timers("forward-compute", level=2):
        clock.now += 1.0
    assert timers.collect(lambda mine: [mine]) == {}


def test_every_rank_gathers_the_same_names() -> None:
    """Stages have different timers: each rank must still hand over numbers of the same length and order."""
    clock = Clock()
    first, last = Timers(clock=HostClock(clock)), Timers(clock=HostClock(clock))
    with first("forward-send"):
        clock.now += 1.0
    with last("embedding-grads-all-reduce"):
        clock.now += 2.0
    handed: list[list[float]] = []
    for timers in (first, last):
        timers.collect(lambda mine: handed.append(mine) or [mine])  # type: ignore[func-returns-value]
    assert len(handed[0]) == len(handed[1])
    assert sorted(handed[0])[-1] == 1000.0
    assert [a + b for a, b in zip(*handed, strict=True) if a + b] == [1000.0, 2000.0]


def test_a_running_timer_is_split_by_a_reset() -> None:
    clock = Clock()
    timer = Timers(clock=HostClock(clock))("optimizer")
    timer.start()
    clock.now += 3.0
    assert timer.elapsed(reset=True) == 3.0
    clock.now += 2.0
    timer.stop()
    assert timer.elapsed() == 2.0


def test_a_timer_stops_when_its_block_raises() -> None:
    timers = Timers()
    with pytest.raises(KeyError), timers("optimizer"):
        raise KeyError
    with timers("optimizer"):
        pass


def test_misuse_is_refused() -> None:
    timer = Timers()("optimizer")
    with pytest.raises(RuntimeError, match="'optimizer' is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'optimizer' is already running"):
        timer.start()


TIMES = {"forward-backward": [10.0, 12.346], "grads-all-reduce": [0.0, 7.0]}


def test_minmax_report() -> None:
    assert format_timers(TIMES, "minmax").splitlines() == [
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (10.00, 12.35)",
        "    grads-all-reduce ...............................: (7.00, 7.00)",
    ]
    name = format_timers(TIMES, "minmax").splitlines()[1].strip().split(":")[0]
    assert len(name) == 48


def test_max_and_all_reports() -> None:
    assert format_timers(TIMES, "max").splitlines()[:2] == [
        "max time across ranks (ms):",
        "    forward-backward ...............................: 12.35",
    ]
    lines = format_timers(TIMES, "all").splitlines()
    assert lines[:2] == ["times across ranks (ms):", "  forward-backward:"]
    assert [line.split(":")[1].strip() for line in lines if line.lstrip().startswith("rank")] == [
        "10.00",
        "12.35",
        "7.00",
    ]
