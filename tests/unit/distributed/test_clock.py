"""Clocks of the host and of an asynchronous device."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.clock import HostClock, clock_of
from tests.support.fake_device import FakeDevice


def test_intervals_of_the_host_are_known_immediately() -> None:
    seconds = [5.0]
    clock, durations = HostClock(lambda: seconds[0]), list[float]()
    start = clock.mark()
    seconds[0] = 7.5
    clock.between(start, clock.mark(), durations.append)
    assert durations == [2.5]
    assert clock.host_time(start) == 5.0


def test_intervals_of_a_device_are_reported_later() -> None:
    device = FakeDevice()
    clock, durations = device.clock(), list[float]()
    for seconds in (2.0, 3.0):
        start = clock.mark()
        device.launch(seconds)
        clock.between(start, clock.mark(), durations.append)
    clock.report_known()
    assert durations == []
    device.now = 2.5  # the device is in the second interval
    clock.report_known()
    assert durations == [2.0]
    device.now = 9.0
    clock.report_known()
    clock.report_known()
    assert durations == [2.0, 3.0]
    assert device.synchronized == 0


def test_an_interval_that_ends_on_another_stream_waits_for_both_ends() -> None:
    device = FakeDevice()
    clock, durations = device.clock(), list[float]()
    stop = clock.mark()
    device.launch(1.0)
    clock.between(clock.mark(), stop, durations.append)
    clock.report_known()
    assert durations == []
    device.now = 1.0
    clock.report_known()
    assert len(durations) == 1


def test_synchronize_waits_and_reports_all() -> None:
    device = FakeDevice()
    clock, durations = device.clock(), list[float]()
    start = clock.mark()
    device.launch(4.0)
    clock.between(start, clock.mark(), durations.append)
    clock.synchronize()
    assert durations == [4.0]
    assert (device.now, device.synchronized) == (4.0, 1)


def test_marks_have_times_of_the_host() -> None:
    device = FakeDevice()
    device.now = 100.0
    device.launch(1.0)
    clock = device.clock()
    clock.anchor()
    device.launch(0.5)
    mark = clock.mark()
    clock.synchronize()
    assert clock.host_time(mark) == pytest.approx(101.5)


def test_cpus_have_the_clock_of_the_host() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)


def test_cuda_times_are_those_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device, synchronized = FakeDevice(), list[torch.device]()

    def event(*, enable_timing: bool) -> object:
        assert enable_timing
        return device.event()

    def synchronize(cuda: torch.device) -> None:
        synchronized.append(cuda)
        device.synchronize()

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    clock, durations = clock_of(torch.device("cuda", 3)), list[float]()
    start = clock.mark()
    device.launch(1.5)
    clock.between(start, clock.mark(), durations.append)
    assert synchronized == []
    clock.synchronize()
    assert durations == [1.5]
    assert synchronized == [torch.device("cuda", 3)]
