"""Early exits: signals, a kill switch, an iteration interval, a wall-clock limit.

Ranks see signals, files and clocks at different moments. So every rank votes, the votes are summed with the step's
other numbers, and all ranks act on the sums.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from megatron.config.training import TrainingConfig
from megatron.optimizer.step_summary import ExitReason, StopVotes

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class ExitSignals:
    """Handler that only records signals while active, so that the iteration in progress can complete.

    Previous handlers are restored on exit. Use it in the main thread (Python allows handlers only there).
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def _record(self, number: int, frame: FrameType | None) -> None:
        # Nothing else is safe here, since the signal may interrupt any bytecode, even a print.
        self.received = signal.Signals(number)

    def __enter__(self) -> ExitSignals:
        self.received = None
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()


class ExitPolicy:
    """This rank's votes to stop, the reason that they add up to, and its explanation in the log.

    Args:
        config: the flags that end a run early.
        started: ``time.monotonic()`` at the start of the program.
    """

    def __init__(self, config: TrainingConfig, started: float) -> None:
        self._config, self._started = config, started

    def vote(self, signalled: bool, needs_choice: bool = False) -> StopVotes:
        """This rank's request to stop after the next iteration; those of all ranks are summed.

        Args:
            signalled: whether a signal has arrived.
            needs_choice: whether to choose the compressors again.
        """
        switch, limit = self._config.kill_switch_file, self._config.exit_duration_in_mins
        if switch is not None and os.path.exists(switch):
            return StopVotes(kill_switch=1.0)
        if signalled:
            return StopVotes(signal=1.0)
        too_long = limit is not None and (time.monotonic() - self._started) / 60.0 > limit
        return StopVotes(duration=float(too_long), choice=float(needs_choice))

    @staticmethod
    def reason(votes: StopVotes) -> ExitReason:
        """The greatest reason for which some rank asks to stop."""
        if votes.kill_switch:
            return ExitReason.KILL_SWITCH
        if votes.signal:
            return ExitReason.SIGNAL
        if votes.duration:
            return ExitReason.DURATION
        return ExitReason.CHOICE if votes.choice else ExitReason.NONE

    def explain(self, reason: ExitReason, iteration: int, saved_to: str | None = None) -> str:
        """A log line that explains a reason, and says where the run is saved."""
        why = {
            ExitReason.NONE: "the run goes on",
            ExitReason.CHOICE: "to choose the compressors again",
            ExitReason.INTERVAL: f"--exit-interval {self._config.exit_interval}",
            ExitReason.DURATION: f"--exit-duration-in-mins {self._config.exit_duration_in_mins}",
            ExitReason.SIGNAL: "a termination signal",
            ExitReason.KILL_SWITCH: f"--kill-switch-file {self._config.kill_switch_file} exists",
            ExitReason.DIVERGED: "it has diverged",
        }[reason]
        saved = "not saved (no --save)" if saved_to is None else f"saved to {saved_to}"
        verb = "pausing" if reason is ExitReason.CHOICE else "exiting"
        return f"{verb} after iteration {iteration}: {why}; {saved}"
