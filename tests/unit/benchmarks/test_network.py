"""Measured steps of the network benchmark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lab.hosts import Traffic
from benchmarks.network.run import Workers


@pytest.mark.parametrize(
    ("settling", "long_seconds", "asked"),
    [
        (0, 5.0, [(0, 1), (0, 3)]),
        (1, 5.0, [(1, 1), (1, 3)]),
        (1, 2.0, [(1, 1)]),  # a long step is not repeated
    ],
)
def test_settling_steps_count_for_bytes_but_not_for_times(
    settling: int, long_seconds: float, asked: list[tuple[int, int]]
) -> None:
    """Of each command. Hosts send 2 and 3 MB in a step."""
    commands: list[tuple[int, int]] = []

    def read_traffic() -> list[Traffic]:
        count = sum(map(sum, commands))
        return [Traffic(2_000_000 * count, 0), Traffic(3_000_000 * count, 0)]

    def ask(timeout: float, *, do: str, steps: int, settling: int) -> list[dict[str, float]]:
        assert do == "steps"
        commands.append((settling, steps))
        return [{"seconds": 2.0}] * steps

    workers: Any = SimpleNamespace(lab=SimpleNamespace(traffic=read_traffic), ask=ask)
    steps, sent_mb = Workers.take_steps(workers, 4, long_seconds, settling)
    assert commands == asked
    assert len(steps) == sum(count for _, count in asked)
    assert sent_mb == pytest.approx(3.0)
