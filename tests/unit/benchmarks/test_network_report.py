"""Colors of the network benchmark's figure."""

from __future__ import annotations

import pytest

from benchmarks.network.report import traffic_of


@pytest.mark.parametrize(
    ("case", "traffic"),
    [
        ("fp32", ("fp32 traffic", False)),
        ("bf16 traffic, eager 1F1B", ("bf16 traffic", True)),
        ("delta 4, fixpoint 8 (AQ-SGD)", ("delta 4, fixpoint 8", False)),
        ("delta 4, fixpoint 8, eager 1F1B", ("delta 4, fixpoint 8", True)),
        ("torch DDP, powerSGD_hook, rank 4", ("powersgd, rank 4", True)),
        ("torch DDP, fp16 hook", ("bf16 traffic", True)),
    ],
)
def test_equal_traffic_has_equal_colors(case: str, traffic: tuple[str, bool]) -> None:
    assert traffic_of(case) == traffic
