"""Training in fp32 on several ranks with this library's own matrix products: that with torch's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.support.combinations import mark_repeats
from tests.support.products import need_products, products_chosen
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_run

pytestmark = need_products

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def _runs(parallel: dict[str, Any], model: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Gradient norms with own products and with torch's; the operators are called only by the first."""
    norms = []
    for ours in (True, False):
        with products_chosen(ours) as calls:
            norms.append(tiny_run({"parallel": parallel, "model": model}, 3).grad_norms)
            assert ("product" in calls) == ours
    return norms[0], norms[1]


MODELS: dict[str, dict[str, Any]] = {"dense": {}, "experts": {"num_experts": [4], "moe_ffn_hidden_size": 48}}


@pytest.mark.parametrize(
    ("model", "layout"),
    mark_repeats(product(MODELS, LAYOUTS), keep=[("dense", "tp2 sp"), ("dense", "pp2"), ("experts", "tp2")]),
)
def test_own_products_train_like_torchs(model: str, layout: str) -> None:
    for ours, torchs in run_ranks(2, _runs, LAYOUTS[layout], MODELS[model]):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=0)
