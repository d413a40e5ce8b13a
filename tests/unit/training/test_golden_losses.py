"""Losses of a tiny run, written down: they change only when somebody means to change the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import tiny_run

GOLDEN = Path(__file__).parents[2] / "golden" / "losses" / "tiny_fp64.json"

RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2-like": {"precision": {"fp64": True}},
    "gpt2-like with dropout": {
        "precision": {"fp64": True},
        "model": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    },
    "llama-like": {
        "precision": {"fp64": True},
        "model": {
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "num_query_groups": 2,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
        },
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_the_recorded_ones(name: str) -> None:
    trace = tiny_run(RUNS[name], iterations=5)
    recorded = json.loads(GOLDEN.read_text())[name]
    assert trace.losses == pytest.approx(recorded["losses"], rel=1e-9, abs=0)
    assert trace.grad_norms == pytest.approx(recorded["grad_norms"], rel=1e-9, abs=0)


def record() -> None:
    """Writes the file anew: ``python -c "from tests.unit.training.test_golden_losses import record; record()"``."""
    traces = {name: tiny_run(changes, iterations=5) for name, changes in RUNS.items()}
    content = {name: {"losses": t.losses, "grad_norms": t.grad_norms} for name, t in traces.items()}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
