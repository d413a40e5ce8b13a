"""Training in fp32 on several ranks with this library's own matrix products: that with torch's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.kernels import native, products
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_run

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def _runs(parallel: dict[str, Any], model: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Gradient norms with own products and with torch's; the operators are called only by the first."""
    assert native.problem() is None
    found = []
    for own in (True, False):
        with (
            mock.patch.object(products, "own_products", lambda own=own: own),
            mock.patch.object(native, "operators", wraps=native.operators) as asked,
        ):
            found.append(tiny_run({"parallel": parallel, "model": model}, 3).grad_norms)
            assert asked.called or not own
    return found[0], found[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [{}, {"num_experts": [4], "moe_ffn_hidden_size": 48}], ids=["dense", "experts"])
def test_own_products_train_like_torchs(layout: str, model: dict[str, Any]) -> None:
    if native.problem() is not None or not native.operators().multiplies():
        pytest.skip("the kernels were not compiled, or the processor has no AVX2")
    for own, torchs in run_ranks(2, _runs, LAYOUTS[layout], model):
        torch.testing.assert_close(own, torchs, rtol=1e-4, atol=0)
