"""Clocks for meters: the host's, or events on the stream of a CUDA device.

A call that starts work on a device returns before the work is done, and waiting for NCCL makes the stream wait, not
the host. So on CUDA a mark is an event, which the stream passes when all earlier work is done. No meter waits for the
device: intervals are read once their events have been passed, usually a step later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Mark = Any
"""A moment, as marked by a clock."""

Tell = Callable[[float], object]
"""A callback that takes the seconds of an interval."""


class HostClock:
    """A clock of the host: marks moments and reports the time between them, which is known when a call returns."""

    def __init__(self, read_seconds: Callable[[], float] = time.perf_counter) -> None:
        self._now = read_seconds

    def mark(self) -> Mark:
        """Mark this moment: of the host, or of the device's work launched so far."""
        return self._now()

    def between(self, start: Mark, stop: Mark, tell: Tell) -> None:
        """Call ``tell`` with the seconds between two marks, as soon as they are known."""
        tell(stop - start)

    def report_known(self) -> None:
        """Report the intervals known by now, without waiting."""

    def synchronize(self) -> None:
        """Wait for the device, if any, and report all intervals."""

    def anchor(self) -> None:
        """Wait for the device, if any, and align its time with the host's."""

    def host_time(self, mark: Mark) -> float:
        """Time of a mark on the host's clock (``time.perf_counter``), after ``anchor`` and ``synchronize``."""
        return float(mark)


Clock = HostClock
"""A clock of the host, or its subclass for a device."""


class DeviceClock(HostClock):
    """A clock of a CUDA device: events on the current stream of the calling thread."""

    def __init__(
        self,
        event: Callable[[], Any],
        synchronize: Callable[[], None],
        read_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(read_seconds)
        self._event = event
        self._synchronize = synchronize
        self._unread: deque[tuple[Any, Any, Tell]] = deque()
        self._anchor: tuple[Any, float] | None = None

    def mark(self) -> Mark:
        event = self._event()
        event.record()
        return event

    def between(self, start: Mark, stop: Mark, tell: Tell) -> None:
        self._unread.append((start, stop, tell))

    def report_known(self) -> None:
        # The oldest first; if an interval is not known yet, neither are later intervals. Both ends are queried, since
        # start and stop may have been marked on different streams.
        while self._unread and self._unread[0][1].query() and self._unread[0][0].query():
            start, stop, tell = self._unread.popleft()
            tell(start.elapsed_time(stop) / 1e3)

    def synchronize(self) -> None:
        self._synchronize()
        self.report_known()

    def anchor(self) -> None:
        self._synchronize()
        self._anchor = self.mark(), self._now()

    def host_time(self, mark: Mark) -> float:
        assert self._anchor is not None
        event, seconds = self._anchor
        return float(seconds + event.elapsed_time(mark) / 1e3)


def clock_of(device: torch.device) -> Clock:
    """The clock for computations on a device."""
    if device.type != "cuda":
        return HostClock()
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),
        lambda: torch.cuda.synchronize(device),
    )
