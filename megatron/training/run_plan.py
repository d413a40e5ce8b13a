"""The plan of a run: its steps and their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.config.steps import StepSizes
from megatron.data.build import Datasets

Judge = Callable[[Tensor], Mapping[str, Mapping[str, float]]]
"""Scores task-head outputs, with a row for each draw of an evaluation: file -> metric -> value."""


@dataclass(frozen=True)
class RunPlan:
    """Steps of a run and their data, fixed before the first step.

    Args:
        train_iters: iterations of the whole run.
        sizes: sizes of the steps.
        datasets: train, validation and test; None for a missing split.
        started: ``time.monotonic()`` at the start of the program.
        judge: scores task-head outputs for the validation samples; each evaluation then reads all of them.
    """

    train_iters: int
    sizes: StepSizes
    datasets: Datasets
    started: float
    judge: Judge | None = None
