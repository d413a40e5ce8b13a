"""Runs without a single successful step fail, unless all iterations were skipped by request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.training.program import NothingLearnedError
from megatron.training.progress_state import Progress
from megatron.training.trainer import Trainer


def _end(words: str, done: int, skipped: int, start: int, skipped_before: int) -> None:
    """Ends a run with these counters and ``--iterations-to-skip``."""
    batches, lengths = BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), LengthSchedule.constant(16)
    sizes = StepSizes(batches, lengths, SkippedIterations.parse(words.split()))
    progress, engines = Progress(iteration=done, skipped=skipped), SimpleNamespace(delayed=None)
    trainer: Any = SimpleNamespace(progress=progress, sizes=sizes, engines=engines)
    Trainer._check_learned(trainer, start, skipped_before)


def test_iterations_skipped_by_request_are_not_failed_steps() -> None:
    _end("5-8", done=8, skipped=4, start=4, skipped_before=0)
    _end("5-8", done=8, skipped=6, start=4, skipped_before=2)
    _end("1-8", done=8, skipped=8, start=0, skipped_before=0)
    _end("5-6", done=8, skipped=3, start=4, skipped_before=0)


@pytest.mark.parametrize(
    ("words", "done", "skipped", "start", "skipped_before", "steps"),
    [("", 8, 4, 4, 0, 4), ("5-6", 8, 4, 4, 0, 2), ("5-8", 8, 8, 4, 4, 4), ("7-90", 8, 8, 0, 0, 6)],
)
def test_a_run_of_failed_steps_is_an_error(
    words: str, done: int, skipped: int, start: int, skipped_before: int, steps: int
) -> None:
    with pytest.raises(NothingLearnedError, match=f"all {steps} steps were skipped"):
        _end(words, done, skipped, start, skipped_before)
