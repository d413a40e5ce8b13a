"""Windows that end at skipped iterations, pauses before the report of a step, and checks of its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.optimizer.step_summary import StopVotes
from megatron.training.run_plan import RunPlan
from megatron.training.step_time_check import StepTimeCheck
from megatron.training.trainer import Trainer
from tests.support.events import read_events
from tests.support.tiny import tiny_checkpoints
from tests.unit.training.support import Clock
from tests.unit.training.test_golden_metrics import Run


def test_a_line_due_at_a_skipped_iteration_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    run = Run(tmp_path, clock, {"log_interval": 4, "progress_bar": "off"})
    run.begin()
    batches, lengths = BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), LengthSchedule.constant(16)
    skipped = SkippedIterations.parse(["3-8", "10-12"])
    checkpoints = tiny_checkpoints(run.engines)
    checkpoints.progress = run.progress
    plan = RunPlan(30, StepSizes(batches, lengths, skipped), None, [], [], started=0.0)
    trainer = Trainer(run.engines, plan, checkpoints, run.reporter)
    for iteration in range(1, 13):
        if iteration in skipped:
            trainer._skip_iteration(StopVotes())
        else:
            run.step(4.0 - iteration, 1.0, 1e-3)
    run.reporter.close()
    windows = read_events(tmp_path / "log.jsonl")
    assert [(event["iteration"], event["lm_loss"]) for event in windows] == [(2, 2.5), (9, -5.0)]


def test_a_pause_before_the_report_of_a_step_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    run = Run(tmp_path, clock, {"progress_bar": "off"})
    run.begin()
    clock.now += 0.5
    with run.reporter.paused("check"):
        clock.now += 3.0
    assert clock.now - run.reporter._step_started == 0.5
    run.reporter.close()


def test_the_time_of_each_step_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pauses; a finding is written."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    run = Run(tmp_path, clock, {"progress_bar": "off"})
    run.begin()
    check = StepTimeCheck(None, 0)
    run.reporter.step_time_check = check
    for iteration in range(1, 31):
        run.step(4.0, 1.0, 1e-3)
        if iteration == 20:
            with run.reporter.paused("check"):
                clock.now += 100.0
    for _ in range(11):
        clock.now += 1.0
        run.step(4.0, 1.0, 1e-3)
    run.reporter.close()
    (slowdown,) = read_events(tmp_path / "log.jsonl", "slowdown")
    assert (slowdown["iteration"], slowdown["expected_s"], slowdown["measured_s"]) == (41, 0.5, 1.5)
    assert "--compress-adapt" in (tmp_path / "log.txt").read_text()
