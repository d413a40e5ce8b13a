"""When an island joins the others that have left it behind."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.optimizer.step_summary import ExitReason
from megatron.training.run_plan import RunPlan
from megatron.training.trainer import Trainer
from tests.support.tiny import tiny_checkpoints
from tests.unit.training.support import Clock
from tests.unit.training.test_golden_metrics import Run

ITERATIONS = 4


class CountingTrainer(Trainer):
    """A trainer whose iterations only count.

    ``left_at``: iteration after which the others continue without it. ``stops_at``: iteration with a reason to stop.
    """

    left_at: int | None = None
    stops_at: int | None = None

    def _make_loader(self, *_: object) -> Any:
        return nullcontext()

    def _run_iteration(self, *_: object) -> ExitReason:
        self._count_iteration()
        assert self.rounds is not None
        self.rounds.left_behind = self.progress.iteration == self.left_at
        return ExitReason.INTERVAL if self.progress.iteration == self.stops_at else ExitReason.NONE

    def _skip_iteration(self, *_: object) -> ExitReason:
        return self._run_iteration()


def _trainer(folder: Path, left_behind: bool, skipped: str) -> tuple[CountingTrainer, list[int]]:
    """A trainer at iteration 0, and the iterations at which its island joins the others."""
    run = Run(folder, Clock(), {"progress_bar": "off"})
    run.begin()
    sizes = StepSizes(
        BatchSizeSchedule(4, micro_batch_size=1, dp_size=1),
        LengthSchedule.constant(16),
        SkippedIterations.parse([skipped] if skipped else []),
    )
    joined_at: list[int] = []
    rounds = mock.Mock(left_behind=left_behind, is_round_overdue=lambda done: False)

    def join() -> bool:
        joined_at.append(trainer.progress.iteration)
        rounds.left_behind = False
        return True

    rounds.join = join
    plan = RunPlan(ITERATIONS, sizes, mock.Mock(), [], [], started=0.0)
    trainer = CountingTrainer(run.engines, plan, tiny_checkpoints(run.engines), run.reporter, rounds)
    return trainer, joined_at


@pytest.mark.parametrize("skipped", ["", "2-4"])
@pytest.mark.parametrize("left_at", [None, 1, 3, ITERATIONS])
@pytest.mark.parametrize("left_behind", [False, True])
def test_an_island_that_is_left_behind_joins_before_its_next_step(
    tmp_path: Path, left_behind: bool, left_at: int | None, skipped: str
) -> None:
    trainer, joined_at = _trainer(tmp_path, left_behind, skipped)
    trainer.left_at = left_at
    assert trainer._train() is ExitReason.NONE
    assert trainer.progress.iteration == ITERATIONS
    assert joined_at == [*([0] if left_behind else []), *([] if left_at is None else [left_at])]


def test_an_island_with_a_reason_to_stop_does_not_join(tmp_path: Path) -> None:
    trainer, joined_at = _trainer(tmp_path, False, "")
    trainer.left_at = trainer.stops_at = 2
    assert trainer._train() is ExitReason.INTERVAL
    assert trainer.progress.iteration == 2
    assert not joined_at


def test_an_island_that_misses_the_last_round_of_an_earlier_run_joins(tmp_path: Path) -> None:
    trainer, joined_at = _trainer(tmp_path, False, "")
    trainer.progress.iteration = ITERATIONS
    rounds: Any = trainer.rounds
    rounds.catch_up = lambda done: setattr(rounds, "left_behind", True)
    assert trainer._train() is ExitReason.NONE
    assert joined_at == [ITERATIONS]
