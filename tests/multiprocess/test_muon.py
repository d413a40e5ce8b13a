"""Muon's messages to gather whole matrices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train

MATRICES = 4 * 12 * 32**2
"""Numbers in the matrices of the layers."""


def _sent(parallel: dict[str, Any], precision: dict[str, Any]) -> int:
    engines = tiny_engines({"optimizer": {"optimizer": "muon"}, "parallel": parallel, "precision": precision})
    accounts: list[dict[str, Any]] = []
    engines.ledger.take_totals()
    tiny_train(
        engines, 1, after_step=lambda e: accounts.append(e.ledger.take_totals().get("optimizer", {"wire_bytes": 0}))
    )
    return int(accounts[0]["wire_bytes"])


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks", "parallel", "precision", "replicas", "tensors"),
    [
        (2, {}, {}, 0, 0),
        (2, {"tensor_model_parallel_size": 2}, {}, 0, 2 * 4 * MATRICES // 2),
        (4, {"tensor_model_parallel_size": 2}, {"bf16": True}, 0, 2 * 2 * 2 * MATRICES // 2),
        (2, {"use_distributed_optimizer": True}, {}, 2 * 4 * MATRICES // 2, 0),
        (
            4,
            {"use_distributed_optimizer": True, "tensor_model_parallel_size": 2},
            {"bf16": True},
            2 * 2 * MATRICES // 2,
            2 * 2 * MATRICES // 2,
        ),
    ],
    ids=["dp2", "tp2", "tp2 dp2 bf16", "dp2 sharded", "tp2 dp2 sharded bf16"],
)
def test_the_bytes_of_whole_matrices(
    ranks: int, parallel: dict[str, Any], precision: dict[str, Any], replicas: int, tensors: int
) -> None:
    """Of all ranks. Replicas send less than the bound: much of a matrix lies at its owner's."""
    between = sum(run_ranks(ranks, _sent, parallel, precision)) - tensors
    assert 0 < between < 0.6 * replicas if replicas else between == 0
