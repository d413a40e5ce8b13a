"""The plan of a run: its steps and their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.config.steps import StepSizes
from megatron.data.build import Dataset
from megatron.training.evaluation import EvaluationSet

Judge = Callable[[Tensor], Mapping[str, Mapping[str, float]]]
"""Scores task-head outputs, with a row for each draw of an evaluation: file -> metric -> value."""


@dataclass(frozen=True)
class RunPlan:
    """Steps of a run, their data and its start, fixed before the first step.

    Args:
        train_iters: iterations of the whole run.
        sizes: sizes of the steps.
        train_set: training set; None without one.
        valid_sets, test_sets: sets to evaluate; empty without evaluation.
        started: ``time.monotonic()`` at the start of the program.
        judge: scores task-head outputs for the validation samples; each evaluation then reads all of them.
    """

    train_iters: int
    sizes: StepSizes
    train_set: Dataset | None
    valid_sets: Sequence[EvaluationSet]
    test_sets: Sequence[EvaluationSet]
    started: float
    judge: Judge | None = None
