"""What compressors hold between steps, beside the formulas."""

from __future__ import annotations

import json

import pytest

from tests.support.cli import run_cli

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("case", ["dense", "CB+LEP+FE+SC", "Radius d=0.1"])
def test_compressors_hold_one_residual(case: str) -> None:
    """One residual with its factors or indices, and nothing else."""
    sizes = ["--layers", "4", "--hidden", "64", "--seq", "32", "--vocab", "64"]
    result = run_cli(4, ["-m", "benchmarks.memory", "--case", case, *sizes]).check()
    found = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert found["peak"] > 0
    if case == "dense":
        assert found["held"] == found["formula"] == 0
    else:
        assert 0 < found["held"] <= found["formula"]
