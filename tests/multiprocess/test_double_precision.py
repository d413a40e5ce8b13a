"""``--fp64`` computes everything in float64 on several ranks, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.roundings import roundings
from tests.support.spawn import run_ranks
from tests.support.tiny import T5

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
DIST = {"use_distributed_optimizer": True}
SIX = {"global_batch_size": 6}
EXPERTS = {"num_experts": [4], "moe_z_loss_coeff": 1e-3, "moe_aux_loss_coeff": 0.05}
LAYOUTS: dict[int, dict[str, Changes]] = {
    2: {
        "tp2, lamb": {"optimizer": {"optimizer": "lamb"}, "parallel": TP2},
        "dp2 sharded overlap, muon": {
            "optimizer": {"optimizer": "muon"},
            "training": SIX,
            "parallel": {**DIST, "overlap_grad_reduce": True, "ddp_bucket_size": 3000},
        },
        "pp2 virtual": {
            "model": {"num_layers": 4},
            "training": SIX,
            "parallel": {**PP2, "num_layers_per_virtual_pipeline_stage": 1},
        },
        "bert, tp2 sp": {"model": {"model_type": "bert"}, "parallel": {**TP2, **SP}},
        "t5, pp2": {**T5, "parallel": PP2},
        "experts, ep2 of tp2": {
            "model": EXPERTS,
            "parallel": {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        },
    },
    4: {
        "tp2 pp2 in parts": {"parallel": {**TP2, **PP2, "scatter_gather_tensors_in_pipeline": True}},
        "experts, tp2 ep2 sp": {
            "model": EXPERTS,
            "training": SIX,
            "parallel": {**TP2, **SP, "expert_model_parallel_size": 2},
        },
    },
}


def _roundings(runs: dict[str, Changes]) -> dict[str, set[str]]:
    return {name: roundings(changes) for name, changes in runs.items()}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_no_step_leaves_float64(ranks: int) -> None:
    for places in run_ranks(ranks, _roundings, LAYOUTS[ranks]):
        assert places == {name: set() for name in LAYOUTS[ranks]}
