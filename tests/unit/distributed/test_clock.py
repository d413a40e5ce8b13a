"""Clocks of the host and of a device whose work comes later."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.clock import HostClock, clock_of
from tests.support.fake_device import FakeDevice


def test_the_hosts_intervals_are_known_at_once() -> None:
    now = [5.0]
    clock, told = HostClock(lambda: now[0]), list[float]()
    start = clock.mark()
    now[0] = 7.5
    clock.between(start, clock.mark(), told.append)
    assert told == [2.5]
    assert clock.host_time(start) == 5.0


def test_a_devices_intervals_are_its_own_and_come_late() -> None:
    device = FakeDevice()
    clock, told = device.clock(), list[float]()
    for seconds in (2.0, 3.0):
        start = clock.mark()
        device.launch(seconds)
        clock.between(start, clock.mark(), told.append)
    clock.report_known()
    assert told == []
    device.now = 2.5  # the host went on; the device is in the second interval
    clock.report_known()
    assert told == [2.0]
    device.now = 9.0
    clock.report_known()
    clock.report_known()
    assert told == [2.0, 3.0]
    assert device.synchronized == 0


def test_an_interval_that_ends_on_another_stream_waits_for_both_ends() -> None:
    device = FakeDevice()
    clock, told = device.clock(), list[float]()
    stop = clock.mark()
    device.launch(1.0)
    clock.between(clock.mark(), stop, told.append)
    clock.report_known()
    assert told == []
    device.now = 1.0
    clock.report_known()
    assert len(told) == 1


def test_synchronize_waits_and_tells_all() -> None:
    device = FakeDevice()
    clock, told = device.clock(), list[float]()
    start = clock.mark()
    device.launch(4.0)
    clock.between(start, clock.mark(), told.append)
    clock.synchronize()
    assert told == [4.0]
    assert (device.now, device.synchronized) == (4.0, 1)


def test_marks_are_placed_on_the_hosts_clock() -> None:
    device = FakeDevice()
    device.now = 100.0
    device.launch(1.0)
    clock = device.clock()
    clock.anchor()
    device.launch(0.5)
    mark = clock.mark()
    clock.synchronize()
    assert clock.host_time(mark) == pytest.approx(101.5)


def test_the_device_decides_which_clock() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)


def test_on_cuda_events_take_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = FakeDevice(), list[torch.device]()

    def event(*, enable_timing: bool) -> object:
        assert enable_timing
        return device.event()

    def synchronize(which: torch.device) -> None:
        asked.append(which)
        device.synchronize()

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    clock, told = clock_of(torch.device("cuda", 3)), list[float]()
    start = clock.mark()
    device.launch(1.5)
    clock.between(start, clock.mark(), told.append)
    assert asked == []
    clock.synchronize()
    assert told == [1.5]
    assert asked == [torch.device("cuda", 3)]
