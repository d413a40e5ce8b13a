"""Timeline of a rank as a Chrome trace for Perfetto and chrome://tracing.

Spans nest (forward contains encode, wait and decode of tensor-parallel collectives). On CUDA they measure device time,
and the trace includes the device's kernels. Communications are on separate tracks, from start to completion, with
their bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.compression.points import Point
from megatron.distributed.clock import Clock, HostClock, Mark
from megatron.distributed.group import Pending
from megatron.distributed.kernel_trace import FIRST_STREAM, DeviceKernels
from megatron.distributed.layout import Layout
from megatron.distributed.observer import Observer


@dataclass(frozen=True)
class _TraceSpan:
    name: str
    start: Mark
    stop: Mark
    args: dict[str, Any]


@dataclass(frozen=True)
class _Communication:
    """A communication, from its start on the host to the mark of its completion."""

    name: str
    point: str
    started: float
    stop: Mark
    sent_bytes: int


class Trace(Observer):
    """Recorder of the iterations from ``first`` up to, but not including, ``last``; written to a file after the last.

    Args:
        path: the file.
        rank: number of the process in the trace.
        label: description of the rank for the reader.
        first, last: iterations, 0-based.
        clock: clock of this rank's device; synchronized only at the beginning and end of an iteration.
        kernels: recorder of the device's kernels; None without a device.
        layout: the mesh of the run; all of its ranks write traces.
        schedule: pipeline schedule of the run.
        run: unique name of the run, the same on all of its ranks.
        barrier: a barrier that is used to align the ranks' clocks.
    """

    def __init__(
        self,
        path: Path,
        rank: int = 0,
        label: str = "",
        first: int = 0,
        last: int = 0,
        clock: Clock | None = None,
        kernels: DeviceKernels | None = None,
        layout: Layout = Layout(),  # noqa: B008  # immutable
        schedule: str = "",
        run: str = "",
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.rank = rank
        self.label = label
        self.first, self.last = first, last
        self.layout, self.schedule, self.run = layout, schedule, run
        self._clock: Clock = clock or HostClock()
        self._barrier = barrier
        self._kernels = kernels
        self._iteration: int | None = None  # None outside of recorded iterations
        self._spans: list[_TraceSpan] = []
        self._communications: list[_Communication] = []
        self._events: list[dict[str, Any]] = []
        self._num_communications = 0
        self._aligned: float | None = None
        # Wall-clock time, so that ranks of a machine agree, but monotonic.
        self._offset = time.time() - time.perf_counter()

    def begin_step(self, iteration: int) -> None:
        """Start recording, if the step is in the range."""
        if not self.first <= iteration < self.last:
            return
        if self._aligned is None:
            self._barrier()
            self._aligned = time.perf_counter() + self._offset
        if self._kernels is not None:
            self._kernels.start()
        self._clock.anchor()
        self._iteration = iteration
        self._iteration_start = self._clock.mark()

    def on_schedule(self, name: str) -> None:
        self.schedule = f"auto: {name}"

    def end_step(self) -> None:
        """End the step; write the file after the last recorded step."""
        if self._iteration is None:
            return
        iteration, self._iteration = self._iteration, None
        self._spans.append(_TraceSpan("iteration", self._iteration_start, self._clock.mark(), {}))
        self._clock.synchronize()
        try:
            for span in self._spans:
                begin = self._to_microseconds(self._clock.host_time(span.start))
                end = self._to_microseconds(self._clock.host_time(span.stop))
                duration = max(round(end - begin, 1), 0.0)
                event = {"name": span.name, "ph": "X", "pid": self.rank, "tid": 0, "ts": begin, "dur": duration}
                self._events.append({**event, "args": {"iteration": iteration, **span.args}})
            for communication in self._communications:
                self._num_communications += 1
                begin = self._to_microseconds(communication.started)
                end = self._to_microseconds(self._clock.host_time(communication.stop))
                common = {"name": communication.name, "cat": communication.point, "pid": self.rank, "tid": 0}
                common["id"] = f"{self.rank}.{self._num_communications}"
                args = {"point": communication.point, "sent bytes": communication.sent_bytes, "iteration": iteration}
                self._events.append({**common, "ph": "b", "ts": begin, "args": args})
                self._events.append({**common, "ph": "e", "ts": max(begin, end)})
            for kernel in self._kernels.stop() if self._kernels is not None else ():
                self._events.append({**kernel, "ph": "X", "pid": self.rank, "args": {"iteration": iteration}})
            self._spans, self._communications = [], []
            if iteration + 1 == self.last:
                self.write()
        except OSError as error:  # no reason to stop a training run
            sys.stderr.write(f"warning: the trace {self.path} cannot be written: {error.strerror}\n")

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record a span."""
        return nullcontext() if self._iteration is None else self._span(name, args)

    @contextmanager
    def _span(self, name: str, args: dict[str, Any]) -> Iterator[None]:
        start = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append(_TraceSpan(name, start, self._clock.mark(), args))

    def on_complete(self, name: str, point: Point, pending: Pending) -> None:
        """Record the completion of a communication."""
        if self._iteration is not None:
            communication = _Communication(name, point.value, pending.started, self._clock.mark(), pending.sent_bytes)
            self._communications.append(communication)

    def write(self) -> None:
        """Write the trace atomically.

        Raises:
            OSError: when the file cannot be written.
        """
        if not self._events:
            return
        names = [
            {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank} ({self.label})"}},
            {"name": "process_sort_index", "ph": "M", "pid": self.rank, "args": {"sort_index": self.rank}},
            {"name": "thread_name", "ph": "M", "pid": self.rank, "tid": 0, "args": {"name": "compute and waits"}},
        ]
        for tid in sorted({event["tid"] for event in self._events} - {0}):
            names.append({**names[-1], "tid": tid, "args": {"name": f"device, stream {tid - FIRST_STREAM}"}})
        aligned = None if self._aligned is None else round(self._aligned * 1e6, 1)
        mesh = {"tp": self.layout.tp, "pp": self.layout.pp, "dp": self.layout.dp}
        about = {"rank": self.rank, "label": self.label, "world_size": self.layout.world_size, "run": self.run}
        content = {
            "traceEvents": names + self._events,
            "displayTimeUnit": "ms",
            "otherData": {**about, "layout": mesh, "schedule": self.schedule, "aligned_us": aligned},
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        os.replace(partial, self.path)
        self._events = []

    def _to_microseconds(self, seconds: float) -> float:
        """Convert a ``time.perf_counter`` reading to microseconds since 1970."""
        return round((seconds + self._offset) * 1e6, 1)
