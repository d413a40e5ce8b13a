"""The clock of CUDA devices, on one that is made up: what it counts, and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.device_clock import CpuClock, CudaClock

LAUNCH, L2 = 1e-3, 1000


class Device:
    """A device whose calls take time of their own, less when they find their input in the L2, and a host that takes
    a millisecond for each launch. Stands for torch.cuda."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held: list[str] = []
        self.recording: list[tuple[str, float]] | None = None
        self.mode = "default"
        self.stream = "usual"
        self.synchronized = 0
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = outer.now

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * float(end.at - self.at)

        class CUDAGraph:
            def __init__(self) -> None:
                self.calls: list[tuple[str, float]] = []

            def replay(self) -> None:
                for call in self.calls:
                    outer.run(*call)

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def run(self, name: str, seconds: float) -> None:
        """On the device; the L2 holds the newest inputs."""
        self.now += seconds / 10 if name in self.held else seconds
        self.held = [*[one for one in self.held if one != name], name][-4:]

    def launch(self, name: str, seconds: float) -> None:
        """From the host, whose time is the device's when nothing else keeps it busy."""
        if self.recording is not None:
            self.recording.append((name, seconds))
        else:
            self.now += LAUNCH
            self.run(name, seconds)

    def wait(self) -> None:
        """A call that reads a result."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing operation")

    def wait_unseen(self) -> None:
        """The same in a library that torch does not watch."""
        if self.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def synchronize(self) -> None:
        self.synchronized += 1

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        """Like torch's: one that fails leaves its stream the current one."""
        self.recording, before, self.stream = [], self.stream, "of the capture"
        try:
            yield
            graph.calls = self.recording
            self.stream = before
        finally:
            self.recording = None


@pytest.fixture
def device() -> Device:
    return Device()


def clock_on(device: Device) -> CudaClock:
    clock = CudaClock(0.1, L2, device, "cpu")
    clock._flush = Flush(device)  # type: ignore[assignment]
    return clock


class Flush:
    """Overwrites the L2."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def zero_(self) -> None:
        self.device.held = []


def test_short_calls_are_timed_without_their_launches_and_out_of_the_l2(device: Device) -> None:
    """A launch takes a thousand times as long as the call; the L2 holds the inputs of four calls."""
    clock = clock_on(device)
    calls = [lambda i=i: device.launch(f"input {i}", 1e-6) for i in range(clock.sets(250))]
    assert len(calls) == 16
    found = clock.time(calls)
    assert found.seconds == pytest.approx(1e-6)
    assert found.how == "graph"


@pytest.mark.parametrize("wait", [Device.wait, Device.wait_unseen])
def test_what_waits_is_timed_by_events_call_by_call(device: Device, wait: Callable[[Device], None]) -> None:
    def call() -> None:
        device.launch("input", 1e-4)
        wait(device)

    found = clock_on(device).time([call, call])
    assert found.seconds == pytest.approx(LAUNCH + 1e-4)
    assert found.how == "events"
    assert (device.mode, device.stream, device.recording) == ("default", "usual", None)


def test_long_calls_are_timed_by_events_out_of_the_l2(device: Device) -> None:
    before = device.synchronized
    found = clock_on(device).time([lambda: device.launch("input", 0.5)])
    assert found.seconds == pytest.approx(0.5 + LAUNCH)
    assert found.how == "events"
    assert device.synchronized - before == 2  # behind the calls, not around each


def test_sets_of_inputs_are_larger_than_the_l2() -> None:
    clock = CudaClock(0.1, L2, Device(), "cpu")
    assert [clock.sets(n) for n in (1, 100, 1000, 3999, 4000, 10**9)] == [64, 40, 4, 2, 1, 1]
    assert CpuClock(0.1).sets(1) == 1


def test_a_cpu_is_timed_by_its_clock() -> None:
    ran: list[int] = []
    found = CpuClock(0.001).time([lambda: ran.append(1), lambda: ran.append(2)])
    assert found.how == "clock"
    assert 0 <= found.seconds < 1
    assert set(ran) == {1}
    assert len(ran) >= 3
    assert torch.tensor(found.seconds).isfinite()
