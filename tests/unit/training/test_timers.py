"""Named timers and their report."""

from __future__ import annotations

import pytest

from megatron.distributed.clock import HostClock
from megatron.training.timers import Timers
from tests.unit.training.support import Clock


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
    """Stages have different timers, but their lists must have the same length and order."""
    clock = Clock()
    first, last = Timers(clock=HostClock(clock)), Timers(clock=HostClock(clock))
    with first("forward-send"):
        clock.now += 1.0
    with last("grads-all-reduce"):
        clock.now += 2.0
    gathered: list[list[float]] = []
    for timers in (first, last):
        timers.collect(lambda mine: gathered.append(mine) or [mine])  # type: ignore[func-returns-value]
    assert sorted(gathered[0])[-1] == 1000.0
    assert [a + b for a, b in zip(*gathered, strict=True) if a + b] == [1000.0, 2000.0]


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


def test_reports() -> None:
    assert Timers(option="minmax").report(TIMES).splitlines() == [
        "(min, max) time across ranks (ms):",
        f"    {'forward-backward ':.<48}: (10.00, 12.35)",
        f"    {'grads-all-reduce ':.<48}: (7.00, 7.00)",
    ]
    first_lines = ["max time across ranks (ms):", f"    {'forward-backward ':.<48}: 12.35"]
    assert Timers(option="max").report(TIMES).splitlines()[:2] == first_lines
    lines = Timers(option="all").report(TIMES).splitlines()
    assert lines[:2] == ["times across ranks (ms):", "  forward-backward:"]
    ranks = [line.split(":")[1].strip() for line in lines if line.lstrip().startswith("rank")]
    assert ranks == ["10.00", "12.35", "7.00"]
