"""Bytes that compressors hold between steps, compared with the formulas."""

from __future__ import annotations

import json

import pytest

from tests.support.cli import run_cli

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("case", ["dense", "CB+LEP+FE+SC", "Radius d=0.1"])
def test_compressors_hold_a_residual_with_its_factors_or_indices(case: str) -> None:
    sizes = ["--layers", "4", "--hidden", "64", "--seq", "32", "--vocab", "64"]
    result = run_cli(4, ["-m", "benchmarks.memory", "--case", case, *sizes]).check()
    figures = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert figures["peak"] > 0
    if case == "dense":
        assert figures["held"] == figures["formula"] == 0
    else:
        assert 0 < figures["held"] <= figures["formula"]
