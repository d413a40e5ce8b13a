"""The plan of a run: its steps and their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.config.steps import StepSizes
from megatron.data.build import Dataset
from megatron.training.evaluation import EvaluationSet

ScoreOutputs = Callable[[Tensor], Mapping[str, Mapping[str, float]]]
"""Function from the task-head outputs of an evaluation, a row per draw, to scores: file -> metric -> value."""


@dataclass(frozen=True)
class RunPlan:
    """Steps of a run, their data and its start, fixed before the first step.

    Args:
        train_iters: iterations of the whole run.
        sizes: sizes of the steps.
        train_set: training set; None without one.
        valid_sets, test_sets: sets to evaluate; empty without evaluation.
        started: ``time.monotonic()`` at the start of the program.
        score_outputs: scores the validation samples' task-head outputs; each evaluation then reads all samples.
    """

    train_iters: int
    sizes: StepSizes
    train_set: Dataset | None
    valid_sets: Sequence[EvaluationSet]
    test_sets: Sequence[EvaluationSet]
    started: float
    score_outputs: ScoreOutputs | None = None
