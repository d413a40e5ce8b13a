"""Predictions of sums in two levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.planner.cluster import LinkSpec
from tests.unit.planner.support import CLUSTER, predictor_of, small_run

SPEC = "dp-grad=fixpoint,levels=8/4"
PER_NUMBER = {bits: bits / 8 + 4 / 64 for bits in (4, 8)}
"""Bytes of a number, with its share of a scale."""


def _elements(**sections: Any) -> float:
    predictor, choice = predictor_of(small_run(**sections))
    return sum(predictor.elements(choice, rank) for rank in range(choice.pp)) / choice.pp


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_bytes_match_the_formula(per_node: int, sharded: bool) -> None:
    """Inside (G-1)/G n b1/8, and back with b2; between nodes (M-1)/M (n/G) b2/8 in each direction."""
    parallel: dict[str, Any] = {"parallel": {"use_distributed_optimizer": sharded}}
    predictor, choice = predictor_of(small_run(specs=(SPEC,), **parallel), replace(CLUSTER, gpus_per_node=per_node))
    prediction = predictor.predict(choice)
    n, g, m, back = _elements(**parallel), per_node, 8 // per_node, 0 if sharded else 1
    last = 8 if m == 1 else 4
    inside = (g - 1) / g * n * (PER_NUMBER[8] + back * PER_NUMBER[last])
    across = (1 + back) * (m - 1) / m * n / g * PER_NUMBER[4]
    assert prediction.sent["dp-grad"] == pytest.approx(inside + across, rel=0.02)
    assert prediction.across.get("dp-grad", 0.0) == pytest.approx(across, rel=0.02)


def test_replicas_of_tensor_parallel_ranks_share_a_node() -> None:
    """A node of four ranks has two replicas of two tensor-parallel ranks; a single replica makes a single level."""
    for tp, g in ((2, 2), (4, 1)):
        sections: dict[str, Any] = {"parallel": {"tensor_model_parallel_size": tp}}
        predictor, choice = predictor_of(small_run(specs=(SPEC,), **sections))
        m = 8 // tp // g
        across = 2 * (m - 1) / m * _elements(**sections) / g * PER_NUMBER[4]
        assert predictor.predict(choice).across["dp-grad"] == pytest.approx(across, rel=0.02)


def test_slow_links_between_nodes_make_two_levels_faster() -> None:
    """By nearly the number of ranks on a node."""
    slow = replace(CLUSTER, across=LinkSpec(0.01, 20.0))
    seconds = {}
    for spec in (SPEC, "dp-grad=fixpoint,bits=4"):
        predictor, choice = predictor_of(small_run(specs=(spec,)), slow)
        seconds[spec] = predictor.predict(choice).parts["gradients"]
    assert 2.0 < seconds["dp-grad=fixpoint,bits=4"] / seconds[SPEC] < 4.0


def test_levels_of_the_tied_embedding() -> None:
    specs = ("embedding=fixpoint,levels=8/4,fused=on",)
    predictor, choice = predictor_of(small_run(specs=specs, parallel={"pipeline_model_parallel_size": 2}))
    shape = predictor.book.piece(choice, "embedding").tied_shape
    # Each stage has a node: four replicas.
    n, g, m = shape[0] * shape[1], 4, 2
    per_replica = (g - 1) / g * n * (PER_NUMBER[8] + PER_NUMBER[4]) + 2 * (m - 1) / m * n / g * PER_NUMBER[4]
    prediction = predictor.predict(choice)
    assert prediction.sent["embedding"] == pytest.approx(per_replica, rel=0.02)
    across = 2 * (m - 1) / m * n / g * PER_NUMBER[4]
    assert prediction.across["embedding"] == pytest.approx(across, rel=0.02)


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_a_fused_ring_leaves_a_node_once(per_node: int) -> None:
    """Of the holders in a node, only the last one sends to another node."""
    specs, cluster = ("embedding=fused",), replace(CLUSTER, gpus_per_node=per_node)
    predictor, choice = predictor_of(small_run(specs=specs, parallel={"pipeline_model_parallel_size": 2}), cluster)
    prediction = predictor.predict(choice)
    across = prediction.sent["embedding"] / per_node if per_node < 8 else 0.0
    assert prediction.across.get("embedding", 0.0) == across
