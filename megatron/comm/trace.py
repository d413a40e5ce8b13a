"""What one rank did when, as a Chrome trace that Perfetto and chrome://tracing show.

Spans of the calling thread nest (forward holds the encode, wait and decode of tensor-parallel sums). Communications
have tracks of their own, from their start to the moment when their result was there, with their bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any


class Trace:
    """Records the iterations ``first`` to ``last`` (exclusive) and writes them once the last of them has ended.

    Args:
        path: the file; None records nothing.
        rank: number of the process in the trace.
        label: what the rank is, for the reader.
        first, last: 0-based.
        synchronise: waits for the device, so that spans hold what they started; it costs overlap on CUDA.
        world_size: ranks that write a trace beside this one.
        run: the same on all of them, and on no others.
    """

    def __init__(
        self,
        path: Path | None = None,
        rank: int = 0,
        label: str = "",
        first: int = 0,
        last: int = 0,
        synchronise: Callable[[], None] = lambda: None,
        world_size: int = 1,
        run: str = "",
    ) -> None:
        self.path = path
        self.rank = rank
        self.label = label
        self.first, self.last = first, last
        self.world_size, self.run = world_size, run
        self._synchronise = synchronise
        self._iteration: int | None = None
        self._events: list[dict[str, Any]] = []
        self._flights = 0
        self._aligned: float | None = None
        # Wall-clock time, so that ranks of one machine agree, but monotonic.
        self._offset = time.time() - time.perf_counter()

    @property
    def on(self) -> bool:
        """Whether this iteration is recorded."""
        return self._iteration is not None

    def begin(self, iteration: int, meet: Callable[[], None]) -> None:
        """A step begins (-1: an evaluation). ``meet`` is a barrier, by which the ranks' clocks are aligned later."""
        if self.path is None or not self.first <= iteration < self.last:
            return
        if self._aligned is None:
            meet()
            self._aligned = self._now()
        self._iteration = iteration
        self._begun = self._now()

    def end(self) -> None:
        """The step has ended; the file is written after the last one that is recorded."""
        if self._iteration is None:
            return
        self._add("iteration", self._begun, {"iteration": self._iteration})
        finished = self._iteration + 1 == self.last
        self._iteration = None
        if finished:
            try:
                self.write()
            except OSError as error:  # no reason to stop a training run
                sys.stderr.write(f"warning: the trace {self.path} cannot be written: {error.strerror}\n")

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """What the calling thread does inside."""
        return self._span(name, args) if self.on else nullcontext()

    @contextmanager
    def _span(self, name: str, args: dict[str, Any]) -> Iterator[None]:
        self._synchronise()
        start = self._now()
        try:
            yield
        finally:
            self._synchronise()
            self._add(name, start, args)

    def flight(self, name: str, point: str, started: float, sent_bytes: int) -> None:
        """A communication has ended that began at ``started`` (``time.perf_counter``)."""
        if not self.on:
            return
        self._flights += 1
        common = {"name": name, "cat": point, "pid": self.rank, "tid": 0, "id": f"{self.rank}.{self._flights}"}
        args = {"point": point, "sent bytes": sent_bytes, "iteration": self._iteration}
        self._events.append({**common, "ph": "b", "ts": self._micros(started + self._offset), "args": args})
        self._events.append({**common, "ph": "e", "ts": self._micros(self._now())})

    def write(self) -> None:
        """Writes what was recorded, whole or not at all.

        Raises:
            OSError: when the file cannot be written.
        """
        if self.path is None or not self._events:
            return
        names = [
            {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank} ({self.label})"}},
            {"name": "process_sort_index", "ph": "M", "pid": self.rank, "args": {"sort_index": self.rank}},
            {"name": "thread_name", "ph": "M", "pid": self.rank, "tid": 0, "args": {"name": "compute and waits"}},
        ]
        aligned = None if self._aligned is None else self._micros(self._aligned)
        about = {"rank": self.rank, "label": self.label, "world_size": self.world_size, "run": self.run}
        content = {
            "traceEvents": names + self._events,
            "displayTimeUnit": "ms",
            "otherData": {**about, "aligned_us": aligned},
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        os.replace(partial, self.path)
        self._events = []

    def _now(self) -> float:
        return time.perf_counter() + self._offset

    @staticmethod
    def _micros(seconds: float) -> float:
        return round(seconds * 1e6, 1)

    def _add(self, name: str, start: float, args: dict[str, Any]) -> None:
        begin, end = self._micros(start), self._micros(self._now())
        duration = max(round(end - begin, 1), 0.0)
        event = {"name": name, "ph": "X", "pid": self.rank, "tid": 0, "ts": begin, "dur": duration}
        self._events.append({**event, "args": {"iteration": self._iteration, **args}})
