"""Times operations of a device: on a CPU by the clock, on CUDA by events, over inputs that its L2 does not hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.turns import timed

Call = Callable[[], Any]
MOST_SETS = 64
"""Most sets of inputs of one measurement."""
_ROOM = 4
"""The sets of inputs are together so many times as large as the L2."""
_SHORT_SECONDS = 2e-3
"""Calls below this are captured into a graph, since launching them could take longer than running them."""


@dataclass(frozen=True)
class Time:
    """The time of one call.

    Args:
        seconds: median time.
        how: clock, graph (replayed) or events (around each call).
    """

    seconds: float
    how: str


class CallTimer(Protocol):
    """A timer of calls that do the same over different inputs."""

    def sets(self, nbytes: int) -> int:
        """The number of sets of inputs, each of that size, that a measurement needs."""
        ...

    def time(self, calls: Sequence[Call]) -> Time:
        """Measures the time of one call."""
        ...


class CpuClock:
    """Times calls by the processor's clock, with the first set of inputs alone.

    Args:
        budget: seconds of each measurement; there are at least three runs but of what exceeds it at once.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def sets(self, nbytes: int) -> int:
        """One set: code on a CPU finds its inputs in the caches as they are."""
        return 1

    def time(self, calls: Sequence[Call]) -> Time:
        """Takes the median of at least three runs, of as many as the budget allows, and of 30 at most."""
        once = partial(timed, calls[0])
        once()  # what is imported, compiled or allocated at first
        first = once()
        if first > self.budget:
            return Time(first, "clock")
        count = max(3, min(30, int(self.budget / max(first, 1e-6))))
        return Time(statistics.median(once() for _ in range(count)), "clock")


class CudaClock:
    """Times calls by the device's events, which count neither launches nor what the host does meanwhile.

    Short calls are captured into one graph that goes through all sets of inputs, so that each call finds its own
    evicted from the L2. What cannot be captured, or is long, is timed call by call, the L2 overwritten in between.

    Args:
        budget: seconds of each measurement, at least five samples but of what is long.
        l2_bytes: size of the device's L2 cache; asked of the device unless given.
        cuda, device: torch's module and its device, or stand-ins for them.
    """

    def __init__(
        self, budget: float, l2_bytes: int | None = None, cuda: Any = torch.cuda, device: str = "cuda"
    ) -> None:
        self.budget, self.cuda, self.device = budget, cuda, device
        self.l2_bytes = l2_bytes or int(cuda.get_device_properties(cuda.current_device()).L2_cache_size)
        self._flush: torch.Tensor | None = None

    def sets(self, nbytes: int) -> int:
        """As many sets as together are several times as large as the L2."""
        return max(1, min(MOST_SETS, -(-_ROOM * self.l2_bytes // max(nbytes, 1))))

    def time(self, calls: Sequence[Call]) -> Time:
        for call in calls:  # what is loaded, compiled or allocated at first
            call()
        first = statistics.median(self._events(calls[:1], 3))
        if first < _SHORT_SECONDS:
            graph = self._captured(calls)
            if graph is not None:
                count = self._samples(first * len(calls))
                return Time(statistics.median(self._replays(graph, count)) / len(calls), "graph")
        return Time(statistics.median(self._events(calls, self._samples(first))), "events")

    def _samples(self, seconds: float) -> int:
        return 3 if seconds > self.budget else max(5, min(100, int(self.budget / max(seconds, 1e-6))))

    def _events(self, calls: Sequence[Call], count: int) -> list[float]:
        """Times single calls, in seconds; the host runs ahead while the L2 is overwritten."""
        pairs = []
        for number in range(count):
            self._evict()
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[number % len(calls)]()
            end.record()
            pairs.append((start, end))
        self.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _replays(self, graph: Any, count: int) -> list[float]:
        """Times replays of a graph, in seconds, one behind another."""
        graph.replay()
        return self._events([graph.replay], count)

    def _evict(self) -> None:
        if self._flush is None:
            self._flush = torch.empty(2 * self.l2_bytes, dtype=torch.uint8, device=self.device)
        self._flush.zero_()

    def _captured(self, calls: Sequence[Call]) -> Any:
        """Captures all calls in a graph; None where one waits for the device, or does what no graph can."""
        self.cuda.synchronize()
        stream = self.cuda.current_stream()
        try:
            self.cuda.set_sync_debug_mode("error")
            try:
                calls[0]()
            finally:
                self.cuda.set_sync_debug_mode("default")
            graph = self.cuda.CUDAGraph()
            with self.cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError:
            self.cuda.set_stream(stream)  # a capture that fails leaves its own
            self.cuda.synchronize()
            return None
        return graph


def clock_of(device: str, budget: float) -> CallTimer:
    """The timer of a device."""
    return CudaClock(budget) if device == "cuda" else CpuClock(budget)
