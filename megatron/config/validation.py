"""Evaluation during and after training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.base.option import option
from megatron.config.conditions import unless

_EVALUATIONS = unless("validation.eval_iters", 0)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Intervals and sizes of evaluations."""

    eval_iters: int = option(
        100,
        "Batches per evaluation; 0 turns evaluation off.",
        unit="iterations",
        minimum=0,
        maximum=10**6,
        common="evaluate and log",
    )
    eval_interval: int = option(
        1000,
        "Number of iterations between evaluations.",
        unit="iterations",
        minimum=1,
        only_if=(_EVALUATIONS, unless("validation.skip_train")),
        common="evaluate and log",
    )
    full_validation: bool = option(
        False,
        "Read the whole validation set in each evaluation, each sample once, instead of --eval-iters batches.",
        only_if=(_EVALUATIONS,),
    )
    fixed_validation: bool = option(
        False,
        "Read the same first --eval-iters batches of the validation set in each evaluation.",
        only_if=(_EVALUATIONS, unless("validation.full_validation")),
    )
    eval_at_start: bool = option(
        False, "Evaluate before the first step, too.", only_if=(_EVALUATIONS, unless("validation.skip_train"))
    )
    skip_train: bool = option(False, "Evaluate only.")
