"""Allocations that fail: one line that says what to do, no trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron.training.program import EXIT_BUG, Ranks, run_program


def _too_large_for_python() -> object:
    return bytearray(1 << 62)


def _too_large_for_numpy() -> object:
    return np.zeros(1 << 58)


def _too_large_for_torch() -> object:
    return torch.empty(1 << 58)


def _too_large_to_count() -> object:
    return torch.empty(1 << 62)


@pytest.mark.parametrize(
    "ask", [_too_large_for_python, _too_large_for_numpy, _too_large_for_torch, _too_large_to_count]
)
def test_no_room_is_one_line(ask: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    def body(ranks: Ranks) -> None:
        ask()

    assert run_program(body) == EXIT_BUG
    said = capsys.readouterr().err
    assert said.startswith("rank 0: out of memory: ")
    assert said.count("\n") == 1
    assert "lower --micro-batch-size" in said


def test_other_failures_keep_their_trace(capsys: pytest.CaptureFixture[str]) -> None:
    def body(ranks: Ranks) -> None:
        raise RuntimeError("something else")

    assert run_program(body) == EXIT_BUG
    assert "Traceback" in capsys.readouterr().err
