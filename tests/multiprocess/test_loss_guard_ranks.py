"""Checks of the loss on several ranks: which held-out samples they take, and that all follow rank 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from megatron.compression.points import Point
from megatron.data.build import Dataset
from megatron.training.evaluation import EvaluationSet
from megatron.training.loss_guard import CALM_CHECKS, held_out_batches
from megatron.training.saved_choice import describe_choice, specs_in_use
from tests.multiprocess.test_loss_guard import FOUR_BITS, _auto, _guard
from tests.multiprocess.test_trial_steps import SHARDED, Texts, _run_plan
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_engines

pytestmark = pytest.mark.multiprocess

GATHERED = "param-gather=fixpoint,bits=4,group=2048"
GRADIENTS, PARAMETERS = {Point.DP_GRAD: 3.0}, {Point.PARAM_GATHER: 3.0}
"""Measured costs above the budget of 2%."""

GENTLE, HARMFUL = {Point.DP_GRAD: 0.01}, {Point.DP_GRAD: 3.0}
"""Measured costs of the bolder setting of gradients."""

NOTHING: dict[Point, float] = {}
CHECKS = [
    ([GRADIENTS, PARAMETERS], [NOTHING, NOTHING]),
    ([NOTHING, GRADIENTS], [HARMFUL, HARMFUL]),
    ([PARAMETERS, NOTHING], [HARMFUL, HARMFUL]),
    *[([NOTHING, NOTHING], [GENTLE, HARMFUL])] * CALM_CHECKS,
]
"""Costs as measured by ranks 0 and 1, of the settings in use and of the bolder ones."""


def _check_with_other_numbers() -> tuple[list[Any], dict[str, Any]]:
    """What each check changes and says about it, and the state after all."""
    engines = tiny_engines(merge(SHARDED, _auto([FOUR_BITS, GATHERED], budget=2.0)))
    guard, rank = _guard(engines), engines.topology.rank
    steps = []
    for costs, bolder_costs in CHECKS:
        measured = dict(costs[rank]), dict(bolder_costs[rank])
        guard._residual_costs = lambda measured=measured: measured  # type: ignore[method-assign, misc]
        finding = guard.check(1)
        change = finding.line and finding.line.partition("--max-loss-increase 2: ")[2]
        choice = describe_choice(engines.config, engines.topology.layout, engines.plan)
        steps.append((finding.values["eased"], finding.values["emboldened"], change, specs_in_use(choice)))
    return steps, guard.state_dict()


def test_ranks_that_measure_other_costs_decide_as_rank_0() -> None:
    """Another point would be eased, one where none is, none where one is, and a bolder setting would not be taken."""
    first, second = run_ranks(2, _check_with_other_numbers)
    assert first == second
    eight_bits = "fixpoint,bits=8,error-feedback=on"
    specs = [f"dp-grad={eight_bits}", GATHERED]
    steps = first[0]
    assert steps[0] == ("dp-grad", None, f"dp-grad goes on with {eight_bits}", specs)
    assert steps[1] == (None, None, None, specs)
    eased, emboldened, change, specs = steps[2]
    assert (eased, emboldened) == ("param-gather", None)
    assert change.startswith("param-gather goes on ")
    assert steps[3:-1] == [(None, None, None, specs)] * (CALM_CHECKS - 1)
    assert steps[-1][:2] == (None, "dp-grad")
    assert steps[-1][2] == f"dp-grad goes on with {FOUR_BITS.partition('=')[2]}"


class ValidationTexts(Texts):
    """A data set whose samples have other numbers than ``Texts``."""

    def sample_id(self, draw: int) -> int:
        return 1000 + draw


def _take_held_out(samples: int, has_validation: bool) -> list[int]:
    """The numbers of this rank's held-out samples, of a global batch of 4."""
    engines = tiny_engines({})
    plan = _run_plan(engines.config, samples)
    if has_validation:
        dataset = cast(Dataset, ValidationTexts(engines.config, 20))
        plan = replace(plan, valid_sets=[EvaluationSet("", dataset, num_batches=5, batch_size=4)])
    return [number for batch in held_out_batches(engines, plan) for number in batch.sample_ids_b.tolist()]


@pytest.mark.parametrize(
    ("samples", "has_validation", "expected"),
    [(11, False, [[7, 9], [8, 10]]), (2, False, [[0], [1]]), (11, True, [[1000, 1002], [1001, 1003]])],
)
def test_held_out_samples_are_the_last_for_training_without_validation_sets(
    samples: int, has_validation: bool, expected: list[list[int]]
) -> None:
    """With them, the first for validation."""
    assert run_ranks(2, _take_held_out, samples, has_validation) == expected
