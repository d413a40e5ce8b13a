"""The gradients that several ranks apply are those of the logged losses, whatever share of the labels counts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.training.assembly import Engines
from tests.support.combinations import mark_repeats
from tests.support.descent import Changes, descent_ratio, plain_engines
from tests.support.spawn import run_ranks
from tests.support.tiny import T5, tiny_train

pytestmark = pytest.mark.multiprocess


def _of(model: dict[str, Any], **parallel: Any) -> Changes:
    return {"model": model, "parallel": parallel}


EXPERTS = {
    "num_experts": [4],
    "moe_aux_loss_coeff": [2.0, 2.0],
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_z_loss_coeff": 1.0,
}
BERT = {"model_type": "bert"}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}

LAYOUTS: dict[int, dict[str, Changes]] = {
    2: {
        "experts, dp2 sharded": _of(EXPERTS, use_distributed_optimizer=True),
        "experts, ep2": _of(EXPERTS, expert_model_parallel_size=2),
        "experts, tp2 sp": _of(EXPERTS, **TP2, **SP),
        "experts, pp2 virtual": _of({**EXPERTS, "num_layers": 4}, **PP2, num_layers_per_virtual_pipeline_stage=1),
        "bert, dp2": _of(BERT),
        "t5, pp2": {**T5, "parallel": PP2},
    },
    4: {
        "experts, tp2 ep2 sp": _of(EXPERTS, **TP2, **SP, expert_model_parallel_size=2),
        "experts, pp2 dp2": _of(EXPERTS, **PP2),
        "bert, tp2 pp2 sp": _of(BERT, **TP2, **PP2, **SP),
    },
}


def _ratios(runs: dict[str, Changes]) -> dict[str, float]:
    return {name: descent_ratio(changes, masked=True) for name, changes in runs.items()}


# Two ranks have each model, and experts on each kind of layout.
@pytest.mark.parametrize("ranks", mark_repeats(LAYOUTS, keep=[2]))
def test_losses_fall_along_their_own_gradient_by_its_square(ranks: int) -> None:
    for ratios in run_ranks(ranks, _ratios, LAYOUTS[ranks]):
        assert ratios == pytest.approx(dict.fromkeys(LAYOUTS[ranks], 1.0), abs=1e-6)


STEPS = 8


def _applied(changes: Changes) -> tuple[list[dict[str, Tensor]], Engines]:
    """The update that each step subtracts from this rank's parameters, by name; all steps begin with the same
    parameters."""
    engines = plain_engines({**changes, "optimizer": {"lr": 1.0}, "training": {"global_batch_size": 4}}, masked=True)
    params = {name: param for stage in engines.stages for name, param in stage.named_parameters()}
    first = {name: param.detach().clone() for name, param in params.items()}
    moved: list[dict[str, Tensor]] = []

    def note(_: Engines) -> None:
        moved.append({name: first[name] - param.detach() for name, param in params.items()})
        for name, param in params.items():
            param.data.copy_(first[name])

    tiny_train(engines, STEPS, masked=True, after_step=note)
    return moved, engines


def _residuals(engines: Engines) -> dict[str, Tensor]:
    """Sums over the replicas of gradient compressors' residuals, by parameter."""
    residuals: dict[str, Tensor] = {}
    for reducer in engines.sync.reducers:
        pairs = zip(reducer.buckets, reducer.units, strict=True)
        for bucket, unit in ((bucket, unit) for bucket, units in pairs for unit in units):
            flat = unit.state.tensors[RESIDUAL].flatten().clone()
            engines.topology.dp.all_reduce(flat).wait()
            places = unit.ranges or bucket.ranges
            for slot in places:
                residual = flat[slot.start - places[0].start : slot.stop - places[0].start]
                residuals[slot.name] = residual.view(slot.shape)
    return residuals


def _differences(spec: str) -> dict[str, tuple[float, float]]:
    """By compressed parameter: the distance of update plus residual from the sum of the gradients, and the residual's
    size."""
    compressed, engines = _applied({"compression": {"compress": [f"{Point.DP_GRAD.value}={spec}"]}})
    exact, _ = _applied({})
    sums = [{name: sum(step[name] for step in steps) for name in steps[0]} for steps in (compressed, exact)]
    return {
        name: (float((sums[0][name] + residual - sums[1][name]).abs().max()), float(residual.abs().max()))
        for name, residual in _residuals(engines).items()
    }


@pytest.mark.parametrize("spec", ["powersgd,rank=1,error-feedback=local", "fixpoint,bits=2,error-feedback=local"])
def test_updates_and_residuals_add_up_to_the_gradients(spec: str) -> None:
    """Over steps with different shares of labels that count."""
    for differences in run_ranks(2, _differences, spec):
        assert len(differences) >= 8
        for name, (difference, residual) in differences.items():
            assert residual > 1e-4, name
            assert difference < 1e-10, name
