"""Log lines of windows that end among iterations without a step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.optimizer.step_summary import StopVotes
from megatron.training.signals import ExitReason
from megatron.training.trainer import Trainer
from tests.unit.training.test_golden_metrics import Clock, Run


def test_a_line_that_is_due_at_an_iteration_without_a_step_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    run = Run(tmp_path, clock, {"log_interval": 4, "progress_bar": "off"})
    run.begin()
    batches, lengths = BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), LengthSchedule.constant(16)
    skipped = SkippedIterations.parse(["3-8", "10-12"])
    trainer: Any = SimpleNamespace(
        config=run.engines.config,
        engines=run.engines,
        progress=run.progress,
        reporter=run.reporter,
        rounds=None,
        sizes=StepSizes(batches, lengths, skipped),
        _joins=False,
        _after_step=lambda votes: ExitReason.NONE,
    )
    trainer._count_iteration = lambda step_taken: Trainer._count_iteration(trainer, step_taken)
    for iteration in range(1, 13):
        if iteration in skipped:
            Trainer._skip_iteration(trainer, StopVotes())
        else:
            run.step(4.0 - iteration, 1.0, 1e-3)
    run.reporter.close()
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    windows = [event for event in events if event["kind"] == "train"]
    assert [(event["iteration"], event["lm_loss"]) for event in windows] == [(2, 2.5), (9, -5.0)]
