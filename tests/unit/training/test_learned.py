"""The end of a run in which nothing was learned, and iterations left out by request."""

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


def _end(words: str, done: int, skipped: int, begun: int, skipped_before: int) -> None:
    """Ends a run with these counters and ``--iterations-to-skip``."""
    batches, lengths = BatchSizeSchedule(4, micro_batch_size=1, dp_size=1), LengthSchedule.constant(16)
    sizes = StepSizes(batches, lengths, SkippedIterations.parse(words.split()))
    trainer: Any = SimpleNamespace(progress=Progress(iteration=done, skipped=skipped), sizes=sizes)
    Trainer._check_learned(trainer, begun, skipped_before)


def test_iterations_left_out_by_request_are_no_failed_steps() -> None:
    _end("5-8", done=8, skipped=4, begun=4, skipped_before=0)
    _end("5-8", done=8, skipped=6, begun=4, skipped_before=2)
    _end("1-8", done=8, skipped=8, begun=0, skipped_before=0)
    _end("5-6", done=8, skipped=3, begun=4, skipped_before=0)


@pytest.mark.parametrize(
    ("words", "done", "skipped", "begun", "skipped_before", "steps"),
    [("", 8, 4, 4, 0, 4), ("5-6", 8, 4, 4, 0, 2), ("5-8", 8, 8, 4, 4, 4), ("7-90", 8, 8, 0, 0, 6)],
)
def test_steps_that_were_all_skipped_learned_nothing(
    words: str, done: int, skipped: int, begun: int, skipped_before: int, steps: int
) -> None:
    with pytest.raises(NothingLearnedError, match=f"all {steps} steps were skipped"):
        _end(words, done, skipped, begun, skipped_before)
