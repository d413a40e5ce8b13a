"""The clocks of operations: CUDA's on a simulated device, which excludes launches and the L2, and the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.device_clock import CpuClock, CudaClock

LAUNCH, L2 = 1e-3, 1000


class Device:
    """A stand-in for torch.cuda: calls are faster with their input in the L2, and the host takes a millisecond for each
    launch."""

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
        """Runs on the device; the L2 holds the newest inputs."""
        self.now += seconds / 10 if name in self.held else seconds
        self.held = [*[other for other in self.held if other != name], name][-4:]

    def launch(self, name: str, seconds: float) -> None:
        """Launches from the host, while the device waits."""
        if self.recording is not None:
            self.recording.append((name, seconds))
        else:
            self.now += LAUNCH
            self.run(name, seconds)

    def wait(self) -> None:
        """Waits for the device, as torch notices."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing operation")

    def wait_unseen(self) -> None:
        """Waits for the device in a library that torch does not watch."""
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
        """Captures calls; like torch's, a failed capture leaves its stream the current stream."""
        self.recording, before, self.stream = [], self.stream, "capture"
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
    """A stand-in for the tensor that overwrites the L2."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def zero_(self) -> None:
        self.device.held = []


def test_short_calls_are_timed_without_their_launches_and_out_of_the_l2(device: Device) -> None:
    """A launch takes a thousand times as long as the call; the L2 holds the inputs of four calls."""
    clock = clock_on(device)
    calls = [lambda i=i: device.launch(f"input {i}", 1e-6) for i in range(clock.sets(250))]
    assert len(calls) == 16
    time = clock.time(calls)
    assert time.seconds == pytest.approx(1e-6)
    assert time.how == "graph"


@pytest.mark.parametrize("wait", [Device.wait, Device.wait_unseen])
def test_calls_that_wait_are_timed_singly_by_events(device: Device, wait: Callable[[Device], None]) -> None:
    def call() -> None:
        device.launch("input", 1e-4)
        wait(device)

    time = clock_on(device).time([call, call])
    assert time.seconds == pytest.approx(LAUNCH + 1e-4)
    assert time.how == "events"
    assert (device.mode, device.stream, device.recording) == ("default", "usual", None)


def test_long_calls_are_timed_by_events_out_of_the_l2(device: Device) -> None:
    before = device.synchronized
    time = clock_on(device).time([lambda: device.launch("input", 0.5)])
    assert time.seconds == pytest.approx(0.5 + LAUNCH)
    assert time.how == "events"
    assert device.synchronized - before == 2  # after all calls, not after each


def test_input_sets_exceed_the_l2() -> None:
    clock = CudaClock(0.1, L2, Device(), "cpu")
    assert [clock.sets(n) for n in (1, 100, 1000, 3999, 4000, 10**9)] == [64, 40, 4, 2, 1, 1]
    assert CpuClock(0.1).sets(1) == 1


def test_a_cpu_is_timed_by_its_clock() -> None:
    ran: list[int] = []
    time = CpuClock(0.001).time([lambda: ran.append(1), lambda: ran.append(2)])
    assert time.how == "clock"
    assert 0 <= time.seconds < 1
    assert set(ran) == {1}
    assert len(ran) >= 3
