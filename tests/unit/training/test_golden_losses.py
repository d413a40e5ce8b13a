"""Losses of tiny runs equal the recorded ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import Trace, tiny_run

GOLDEN = Path(__file__).parents[2] / "golden" / "losses" / "tiny_fp64.json"

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-like": {},
    "gpt2-like with dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "llama-like": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "num_query_groups": 2,
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    },
}  # fmt: skip


def _trace(name: str) -> Trace:
    return tiny_run({"precision": {"fp64": True}, "model": MODELS[name]}, iterations=5)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradient_norms_are_as_recorded(name: str) -> None:
    trace = _trace(name)
    recorded = json.loads(GOLDEN.read_text())[name]
    assert trace.losses == pytest.approx(recorded["losses"], rel=1e-9, abs=0)
    assert trace.grad_norms == pytest.approx(recorded["grad_norms"], rel=1e-9, abs=0)


def record() -> None:
    """Rewrites the file: ``python -c "from tests.unit.training.test_golden_losses import record; record()"``."""
    traces = {name: _trace(name) for name in MODELS}
    content = {name: {"losses": t.losses, "grad_norms": t.grad_norms} for name, t in traces.items()}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
