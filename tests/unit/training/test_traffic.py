"""The line of --log-comm, and warnings about growing residuals and messages longer than their tensors."""

from __future__ import annotations

import math

import torch

from megatron.compression.health import ResidualHealth
from megatron.compression.points import Point
from megatron.distributed.group import Group
from megatron.training.metrics import PointTraffic
from megatron.training.traffic import TrafficMeter, format_comm_line
from tests.support.tiny import tiny_engines


def test_the_line() -> None:
    traffic = {
        "dp-grad": PointTraffic(8e6, 1e6, 0.0125, 0.003, 0.812, 2.3),
        "control": PointTraffic(64.0, 64.0, 0.0, 0.0001),
    }
    assert format_comm_line(40, traffic, 0.75) == (
        " communication at iteration       40 | per iteration | computed 750.0 ms | "
        "dp-grad: 1.00 MB of 8.00 MB (8.00x), coded 12.5 ms, waited 3.0 ms, residual 0.812 of the gradient, "
        "2.3 steps old | control: 64 B of 64 B (1.00x), coded 0.0 ms, waited 0.1 ms |"
    )


def test_the_line_names_bytes_inside_nodes() -> None:
    line = format_comm_line(1, {"dp-grad": PointTraffic(8e6, 2e6, 0.0, 0.0, inside_bytes=1.5e6)}, 0.0)
    assert "dp-grad: 2.00 MB of 8.00 MB (4.00x), 1.50 MB of it inside nodes, coded 0.0 ms" in line


def _meter() -> TrafficMeter:
    return TrafficMeter(tiny_engines({"compression": {"compress": ["dp-grad=powersgd,rank=2"]}}))


def _warnings(statistics: tuple[float, float, float, float], reports: int) -> tuple[list[str], str]:
    """Warnings after reports with these statistics for all tensors of a bucket, and the first tensor's name."""
    meter = _meter()
    names, state = next(meter.engines.sync.reducers[0].residuals())
    warnings: list[str] = []
    for _ in range(reports):
        state.stage_health(ResidualHealth(*(torch.full((len(names),), x) for x in statistics)))
        warnings += meter.collect(1)[1]
    return warnings, names[0]


def test_residuals_are_summed_over_the_ranks_that_reduce_them() -> None:
    """Expert parameters have fewer replicas than others; the other data-parallel ranks hold other experts."""
    meter = _meter()
    reducer = meter.engines.sync.reducers[0]
    for _, state in reducer.residuals():
        state.stage_health(ResidualHealth(*torch.ones(4, 1)))
    reducer.group = Group(None, (0,), 0, "expert replicas", "none")
    assert {group for _, group, _ in meter._residuals_by_group()} == {reducer.group}


def test_a_growing_residual_gives_a_single_warning() -> None:
    assert _warnings((1.0, 10.0, 16.0, 5.0), reports=2)[0] == []
    warnings, name = _warnings((1.0, 10.0, 16.0, 5.0), reports=9)
    assert any(f"the residual of dp-grad {name} grows without bound: 4 times the gradient" in text for text in warnings)
    assert len(warnings) == len(set(warnings))


def test_old_and_infinite_residuals_give_warnings() -> None:
    assert "what it holds is never sent" in _warnings((1.0, 10.0, 9.0, 1500.0), reports=3)[0][0]
    assert "it is not finite" in _warnings((1.0, math.inf, math.inf, 1.0), reports=1)[0][0]


def test_large_and_slightly_old_residuals_of_sparse_compressors_give_none() -> None:
    assert _warnings((1.0, 10000.0, 9900.0, 99.0), reports=9)[0] == []


def test_a_compressor_that_lengthens_messages_gives_a_single_warning() -> None:
    meter = _meter()
    ledger, warnings = meter.engines.ledger, []
    for wire in (100, 100, 180, 180, 180):  # a warm-up first
        ledger.count_message(Point.DP_GRAD, wire, 100)
        ledger.count_message(Point.CONTROL, 500, 100)
        warnings.append(meter.collect(1)[1])
    warning = "sends 1.27 times what dp-grad would send uncompressed; compress it further, or not at all"
    assert warnings == [[], [], [f"--compress dp-grad=powersgd {warning}"], [], []]
