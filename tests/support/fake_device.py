"""A device that runs its work later, in order, in simulated time that the test advances."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.distributed.clock import DeviceClock


class FakeDevice:
    """A stream. ``now`` is the host's time; ``free`` is the time at which the stream has no work left."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free = 0.0
        self.synchronized = 0

    def launch(self, seconds: float) -> None:
        """Gives the stream something to do and returns at once."""
        self.free = max(self.free, self.now) + seconds

    def wait_for(self, moment: float) -> None:
        """Makes the stream, not the host, wait, as NCCL does."""
        self.free = max(self.free, self.now, moment)

    def synchronize(self) -> None:
        self.synchronized += 1
        self.now = max(self.now, self.free)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def clock(self) -> DeviceClock:
        return DeviceClock(self.event, self.synchronize, lambda: self.now)


class FakeEvent:
    """As torch.cuda.Event: it refuses to tell times that are not known yet."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._passed: float | None = None

    def record(self) -> None:
        self._passed = max(self._device.free, self._device.now)

    def query(self) -> bool:
        return self._passed is not None and self._passed <= self._device.now

    def elapsed_time(self, end_event: FakeEvent) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")
        assert self._passed is not None
        assert end_event._passed is not None
        return (end_event._passed - self._passed) * 1e3


@contextmanager
def never_waited_for(device: FakeDevice) -> Iterator[None]:
    """Fails when the host waits for the device inside."""
    before = device.synchronized
    yield
    assert device.synchronized == before
