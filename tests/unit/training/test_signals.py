"""Exit signals and the exit policy."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megatron.config.training import TrainingConfig
from megatron.optimizer.step_summary import ExitReason
from megatron.training.signals import ExitPolicy, ExitSignals


def _policy(minutes: float = 0.0, **flags: object) -> ExitPolicy:
    """The policy of a program that began some minutes ago."""
    config = TrainingConfig(micro_batch_size=1, **flags)  # type: ignore[arg-type]
    return ExitPolicy(config, time.monotonic() - 60.0 * minutes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_without_ending_the_block(number: signal.Signals) -> None:
    with ExitSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number


def test_previous_handlers_come_back_even_after_an_error() -> None:
    received_signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received_signals.append(number))
    try:
        with pytest.raises(KeyError), ExitSignals():
            raise KeyError
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received_signals == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_ends_after_its_duration() -> None:
    policy = _policy(1.5, exit_duration_in_mins=2)
    assert policy.reason(policy.vote(False)) is ExitReason.NONE
    policy = _policy(2.1, exit_duration_in_mins=2)
    assert policy.reason(policy.vote(False)) is ExitReason.DURATION
    assert policy.reason(policy.vote(True)) is ExitReason.SIGNAL


def test_without_flags_only_signals_end_a_run() -> None:
    policy = _policy()
    assert policy.reason(policy.vote(False)) is ExitReason.NONE
    assert policy.reason(policy.vote(True)) is ExitReason.SIGNAL


def test_ranks_that_differ_agree_on_the_maximum() -> None:
    assert max(ExitReason.NONE, ExitReason.DURATION, ExitReason.INTERVAL) == ExitReason.DURATION
    assert ExitReason(int(ExitReason.SIGNAL)) is ExitReason.SIGNAL


def test_a_run_pauses_to_choose_unless_it_ends() -> None:
    policy = _policy(exit_duration_in_mins=2)
    assert policy.reason(policy.vote(False)) is ExitReason.NONE
    assert policy.reason(policy.vote(False, needs_choice=True)) is ExitReason.CHOICE
    line = "pausing after iteration 7: to choose the compressors again; saved to runs/gpt"
    assert policy.explain(ExitReason.CHOICE, 7, "runs/gpt") == line
    policy = _policy(2.1, exit_duration_in_mins=2)
    assert policy.reason(policy.vote(False, needs_choice=True)) is ExitReason.DURATION
    assert policy.reason(policy.vote(True, needs_choice=True)) is ExitReason.SIGNAL


def test_each_reason_has_its_line() -> None:
    policy = _policy(exit_interval=5, exit_duration_in_mins=1190, kill_switch_file="/x/stop")
    lines = {policy.explain(reason, 7) for reason in ExitReason}
    assert len(lines) == len(ExitReason)
    assert ": --kill-switch-file /x/stop exists; " in policy.explain(ExitReason.KILL_SWITCH, 7)
    line = "exiting after iteration 7: --exit-duration-in-mins 1190; "
    assert policy.explain(ExitReason.DURATION, 7) == f"{line}not saved (no --save)"
    assert policy.explain(ExitReason.DURATION, 7, "runs/gpt") == f"{line}saved to runs/gpt"
