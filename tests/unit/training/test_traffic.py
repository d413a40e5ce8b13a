"""The line of --log-comm, and warnings about residuals that grow and messages that are longer than their tensors."""

from __future__ import annotations

import math

import torch

from megatron.compression.health import ResidualHealth
from megatron.compression.points import Point
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


def test_the_line_says_what_stays_inside_nodes() -> None:
    line = format_comm_line(1, {"dp-grad": PointTraffic(8e6, 2e6, 0.0, 0.0, inside_bytes=1.5e6)}, 0.0)
    assert "dp-grad: 2.00 MB of 8.00 MB (4.00x), 1.50 MB of it inside nodes, coded 0.0 ms" in line


def _meter_and_state() -> tuple[TrafficMeter, object, str]:
    engines = tiny_engines({"compression": {"compress": ["dp-grad=powersgd,rank=2"]}})
    names, state = next(engines.sync.reducers[0].residuals())
    return TrafficMeter(engines), state, names[0]


def _health(k: int, gradient: float, given: float, residual: float, age: float) -> ResidualHealth:
    return ResidualHealth(*(torch.full((k,), x) for x in (gradient, given, residual, age)))


def _warnings(gradient: float, given: float, residual: float, age: float, reports: int) -> list[str]:
    meter, state, _ = _meter_and_state()
    names, _ = next(meter.engines.sync.reducers[0].residuals())
    found: list[str] = []
    for _ in range(reports):
        state.stage_health(_health(len(names), gradient, given, residual, age))  # type: ignore[attr-defined]
        found += meter.collect(1)[1]
    return found


def test_a_residual_that_the_compressor_amplifies_is_named_once() -> None:
    assert _warnings(1.0, 10.0, 16.0, 5.0, reports=2) == []
    found = _warnings(1.0, 10.0, 16.0, 5.0, reports=9)
    _, _, name = _meter_and_state()
    assert any(f"the residual of dp-grad {name} grows without bound: 4 times the gradient" in text for text in found)
    assert len(found) == len(set(found))


def test_one_that_is_never_sent_and_one_that_is_not_finite_are_named() -> None:
    assert "what it holds is never sent" in _warnings(1.0, 10.0, 9.0, 1500.0, reports=3)[0]
    assert "it is not finite" in _warnings(1.0, math.inf, math.inf, 1.0, reports=1)[0]


def test_a_compressor_that_sends_more_than_it_is_given_is_named_once() -> None:
    meter, _, _ = _meter_and_state()
    ledger, found = meter.engines.ledger, []
    for wire in (100, 100, 180, 180, 180):  # a warm-up first
        ledger.count_message(Point.DP_GRAD, wire, 100)
        ledger.count_message(Point.CONTROL, 500, 100)
        found.append(meter.collect(1)[1])
    assert found[:2] == [[], []]
    assert found[2] == [
        "--compress dp-grad=powersgd sends 1.27 times what dp-grad would send uncompressed; compress it further, or "
        "not at all"
    ]
    assert found[3:] == [[], []]


def test_healthy_ones_are_not() -> None:
    """Large and a little old, as sparse compressors leave them."""
    assert _warnings(1.0, 10000.0, 9900.0, 99.0, reports=9) == []
