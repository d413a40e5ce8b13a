"""Checks of what automatically chosen compressors inside layers cost in loss: tensor and expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.schedule import RunLength
from megatron.training.loss_guard import LossGuard
from megatron.training.saved_choice import describe_choice, specs_in_use
from megatron.training.step import take_batches
from tests.support.combinations import mark_repeats
from tests.support.layer_codes import MODULE, TP_POINTS
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_batches, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

TENSORS: dict[str, dict[str, Any]] = {"parallel": {"tensor_model_parallel_size": 2}}
LAYOUTS: dict[str, tuple[dict[str, dict[str, Any]], tuple[Point, ...]]] = {
    "tensors": (TENSORS, TP_POINTS),
    "sequence": (merge(TENSORS, {"parallel": {"sequence_parallel": True}}), TP_POINTS),
    "experts": (
        {
            "model": {"num_experts": [4], "moe_ffn_hidden_size": 32},
            "parallel": {"expert_model_parallel_size": 2},
        },
        EXPERT_POINTS,
    ),
}


def _ease_to_exact(name: str) -> dict[str, tuple[list[float], list[list[str]], list[float], list[str]]]:
    """For each point, the share of its bytes that steps send, the specs in use, the point's cost by the check after
    each step, all of which exceed the budget, and the points whose cost is measured."""
    changes, points = LAYOUTS[name]
    results = {}
    for point in points:
        specs = ["auto", f"{point.value}=codes,bits=4"]
        engines = tiny_engines(merge(changes, {"compression": {"compress": specs, "compress_module": [MODULE]}}))
        batches = tiny_batches(engines.config, engines.topology, False, start=5000)
        count = 4 // engines.topology.layout.dp
        guard = LossGuard(engines, take_batches(batches, count, engines.topology.device), RunLength(30))
        guard._budget = 0.0
        measured = [each.value for each in guard._measure().costs]
        shares, used, costs = [], [], []
        for step in range(4):
            engines.ledger.clear()  # of the checks' traffic
            trace = tiny_train(engines, 1, first=step)
            shares.append(trace.bytes_by_point[point.value] / trace.raw_by_point[point.value])
            used.append(specs_in_use(describe_choice(engines.config, engines.topology.layout, engines.plan)))
            costs.append(guard.check(1).values["points"][point.value])
        results[point.value] = shares, used, costs, measured
    return results


@pytest.mark.parametrize("name", mark_repeats(LAYOUTS, keep=["sequence", "experts"]))
def test_settings_inside_layers_are_followed_to_exact_traffic(name: str) -> None:
    """What forward points cost is measured; behind the gentlest setting, all bytes are sent."""
    for result in run_ranks(2, _ease_to_exact, name):
        for point, (shares, used, costs, measured) in result.items():
            assert used == [[f"{point}=codes,bits=4"], [f"{point}=codes,bits=8"], [], []]
            assert shares[0] < shares[1] < 0.5
            assert shares[2:] == [1.0, 1.0]
            assert costs[0] >= 0.002
            assert costs[2:] == [0.0, 0.0]
            assert measured == [point] * point.endswith("forward")
