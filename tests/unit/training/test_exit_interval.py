"""When --exit-interval ends a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.optimizer.step_summary import ExitReason, StopVotes
from megatron.training.run_plan import RunPlan
from megatron.training.trainer import Trainer
from tests.support.tiny import tiny_checkpoints
from tests.unit.training.support import Clock
from tests.unit.training.test_golden_metrics import Run


@pytest.mark.parametrize(
    ("iteration", "votes", "reason"),
    [
        (3, StopVotes(), ExitReason.NONE),
        (4, StopVotes(), ExitReason.INTERVAL),
        (3, StopVotes(choice=1.0), ExitReason.CHOICE),
        (4, StopVotes(choice=1.0), ExitReason.INTERVAL),
        (4, StopVotes(signal=1.0), ExitReason.SIGNAL),
    ],
)
def test_the_interval_ends_a_run_even_when_it_would_choose_again(
    tmp_path: Path, iteration: int, votes: StopVotes, reason: ExitReason
) -> None:
    """A run that only pauses to choose its compressors would go on past the interval."""
    run = Run(tmp_path, Clock(), {"progress_bar": "off"})
    config = run.engines.config
    engines = replace(run.engines, config=replace(config, training=replace(config.training, exit_interval=4)))
    sizes = StepSizes(
        BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), LengthSchedule.constant(16), SkippedIterations.parse([])
    )
    plan = RunPlan(10, sizes, mock.Mock(), [], [], started=0.0)
    trainer = Trainer(engines, plan, tiny_checkpoints(engines), run.reporter)
    trainer.progress.iteration = iteration
    assert trainer._after_step(votes) is reason
