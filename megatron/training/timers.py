"""Named timers, and their report over all ranks.

Timers do not depend on process groups: reporting takes a function that gathers each rank's list of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal

from megatron.distributed.clock import Clock, HostClock, Mark

TimingOption = Literal["max", "minmax", "all"]
Gather = Callable[[list[float]], list[list[float]]]

# Order of the report, the same on every rank; each stage has only some of these timers.
TIMER_NAMES = (
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "weight-compute",
    "batch-generator",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer",
    "evaluate",
    "save-checkpoint",
)


class Timer:
    """A stopwatch that accumulates. Also a context manager. Not re-entrant."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._started: Mark | None = None
        self._total = 0.0

    def start(self) -> None:
        if self._started is not None:
            raise RuntimeError(f"timer {self.name!r} is already running")
        self._started = self._clock.mark()

    def stop(self) -> None:
        if self._started is None:
            raise RuntimeError(f"timer {self.name!r} is not running")
        self._clock.between(self._started, self._clock.mark(), self._add)
        self._started = None

    def _add(self, seconds: float) -> None:
        self._total += seconds

    def elapsed(self, *, reset: bool = False) -> float:
        """Seconds so far, including a running interval; ``reset`` restarts the count from here.

        On a device, intervals that are not finished yet count next time.
        """
        if self._started is not None:
            mark = self._clock.mark()
            self._clock.between(self._started, mark, self._add)
            self._started = mark
        self._clock.report_known()
        total = self._total
        if reset:
            self._total = 0.0
        return total

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _NoTimer(Timer):
    """A timer above the configured level, which costs nothing and reports nothing."""

    def __init__(self) -> None:
        super().__init__("off", HostClock())

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Timers:
    """Timers by name, and their report.

    Args:
        level: ``--timing-log-level``. Timers of a higher level do nothing. 0: a few coarse timers, 1: parts of an
            iteration, 2: every operation of the pipeline.
        option: ``--timing-log-option``: how a report summarizes the ranks.
        clock: clock of the device whose work is timed.
    """

    def __init__(
        self,
        level: int = 0,
        option: TimingOption = "minmax",
        *,
        clock: Clock | None = None,
    ) -> None:
        self.level = level
        self.option = option
        self._clock: Clock = clock or HostClock()
        self._timers: dict[str, Timer] = {}
        self._no_timer = _NoTimer()

    def __call__(self, name: str, level: int = 0) -> Timer:
        """Return the timer of this name, or a timer that does nothing if ``level`` is above the configured level."""
        if level > self.level:
            return self._no_timer
        if name not in self._timers:
            self._timers[name] = Timer(name, self._clock)
        return self._timers[name]

    def collect(self, gather: Gather, *, iterations: int = 1) -> dict[str, list[float]]:
        """Milliseconds per iteration of each timer on each rank; the timers are reset.

        A collective call. ``gather`` maps this rank's numbers to those of all ranks, in rank order. Timers that ran on
        no rank are left out; a rank on which a timer did not run shows 0.
        """
        own_seconds = [self._timers[name].elapsed(reset=True) if name in self._timers else 0.0 for name in TIMER_NAMES]
        per_rank = gather([seconds * 1000.0 / iterations for seconds in own_seconds])
        columns = {name: [rank[i] for rank in per_rank] for i, name in enumerate(TIMER_NAMES)}
        return {name: values for name, values in columns.items() if any(values)}

    def report(self, times: Mapping[str, Sequence[float]]) -> str:
        """Format the result of ``collect`` by the option: a heading and a line per timer, its name padded with dots to
        48 columns (per rank for ``all``); empty if no timer ran.

        Ranks on which a timer did not run are ignored for the minimum.
        """
        if not times:
            return ""
        if self.option == "all":
            lines = ["times across ranks (ms):"]
            for name, values in times.items():
                lines.append(f"  {name}:")
                lines += [
                    f"    {f'rank {rank:2d} '.ljust(48, '.')}: {value:.2f}"
                    for rank, value in enumerate(values)
                    if value
                ]
            return "\n".join(lines)
        is_range = self.option == "minmax"
        lines = ["(min, max) time across ranks (ms):" if is_range else "max time across ranks (ms):"]
        for name, values in times.items():
            ran = [value for value in values if value]
            summary = f"({min(ran):.2f}, {max(ran):.2f})" if is_range else f"{max(ran):.2f}"
            lines.append(f"    {f'{name} '.ljust(48, '.')}: {summary}")
        return "\n".join(lines)
