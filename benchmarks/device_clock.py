"""Timers of operations: on a CPU by the clock, on CUDA by events, with inputs outside of the L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.turns import timed

Call = Callable[[], Any]
MAX_SETS = 64
"""Maximum number of input sets of a measurement."""
_L2_SIZES = 4
"""Size of all input sets together, as a multiple of the L2 cache."""
_SHORT_SECONDS = 2e-3
"""Shorter calls are captured into a graph, since launching them could take longer than running them."""


@dataclass(frozen=True)
class Time:
    """The median time of a call in seconds, measured by clock, graph (replayed) or events (around each call)."""

    seconds: float
    how: str


class CallTimer(Protocol):
    """A timer of calls that do the same work over different inputs."""

    def sets(self, nbytes: int) -> int:
        """Number of input sets of this size that a measurement needs."""
        ...

    def time(self, calls: Sequence[Call]) -> Time:
        """Measure the time of a call."""
        ...


class CpuClock:
    """Timer by the processor's clock, with the first input set only.

    Args:
        budget: seconds of each measurement; a call that takes longer is timed once, others at least three times.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def sets(self, nbytes: int) -> int:
        """Return 1: on a CPU, the state of the caches is left as it is."""
        return 1

    def time(self, calls: Sequence[Call]) -> Time:
        """Take the median of 3 to 30 runs, as the budget allows."""
        once = partial(timed, calls[0])
        once()  # imports, compilations and allocations
        first = once()
        if first > self.budget:
            return Time(first, "clock")
        count = max(3, min(30, int(self.budget / max(first, 1e-6))))
        return Time(statistics.median(once() for _ in range(count)), "clock")


class CudaClock:
    """Timer by the device's events, which count neither launches nor the host's work.

    Short calls are captured into a graph over all input sets, so that the inputs of each call have been evicted from
    the L2. Long calls, and calls that cannot be captured, are timed one by one, with the L2 overwritten in between.

    Args:
        budget: seconds of each measurement; a call that takes longer is timed three times, others at least five.
        l2_bytes: size of the L2 cache; the device's by default.
        cuda, device: torch's module and its device, or stand-ins for them.
    """

    def __init__(
        self, budget: float, l2_bytes: int | None = None, cuda: Any = torch.cuda, device: str = "cuda"
    ) -> None:
        self.budget, self.cuda, self.device = budget, cuda, device
        self.l2_bytes = l2_bytes or int(cuda.get_device_properties(cuda.current_device()).L2_cache_size)
        self._flush: torch.Tensor | None = None

    def sets(self, nbytes: int) -> int:
        """Number of sets that together exceed the L2 several times."""
        return max(1, min(MAX_SETS, -(-_L2_SIZES * self.l2_bytes // max(nbytes, 1))))

    def time(self, calls: Sequence[Call]) -> Time:
        for call in calls:  # loading, compilation and allocations
            call()
        first = statistics.median(self._events(calls[:1], 3))
        if first < _SHORT_SECONDS:
            graph = self._capture(calls)
            if graph is not None:
                graph.replay()
                seconds = self._events([graph.replay], self._samples(first * len(calls)))
                return Time(statistics.median(seconds) / len(calls), "graph")
        return Time(statistics.median(self._events(calls, self._samples(first))), "events")

    def _samples(self, seconds: float) -> int:
        return 3 if seconds > self.budget else max(5, min(100, int(self.budget / max(seconds, 1e-6))))

    def _events(self, calls: Sequence[Call], count: int) -> list[float]:
        """Time single calls, in seconds; the host runs ahead while the L2 is overwritten."""
        if self._flush is None:
            self._flush = torch.empty(2 * self.l2_bytes, dtype=torch.uint8, device=self.device)
        pairs = []
        for number in range(count):
            self._flush.zero_()  # evicts the inputs
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[number % len(calls)]()
            end.record()
            pairs.append((start, end))
        self.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _capture(self, calls: Sequence[Call]) -> Any:
        """Capture all calls in a graph; None if a call waits for the device or cannot be captured."""
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
            self.cuda.set_stream(stream)  # a failed capture leaves its own stream set
            self.cuda.synchronize()
            return None
        return graph


def clock_of(device: str, budget: float) -> CallTimer:
    """Return the timer of a device."""
    return CudaClock(budget) if device == "cuda" else CpuClock(budget)
