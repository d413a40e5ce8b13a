"""--fp32-residual-connection: a residual stream in fp32."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.base.errors import UserError
from megatron.models.context import ForwardContext
from tests.support.tiny import tiny_batches, tiny_config, tiny_engines, tiny_run

DEEP = {"num_layers": 12}


def _hidden(precision: dict[str, bool], residual: bool) -> torch.Tensor:
    """Output of a model of 12 layers."""
    model = {**DEEP, "fp32_residual_connection": residual}
    engines = tiny_engines({"model": model, "precision": precision})
    stage = engines.stages[0]
    (batch,) = itertools.islice(tiny_batches(engines.config, engines.topology, False), 1)
    hidden = stage(batch.tokens_bs, ForwardContext())
    assert all(parameter.dtype == stage.dtype for parameter in stage.parameters())
    assert stage.final_layernorm(hidden).dtype == stage.dtype
    return hidden


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_stream_is_in_fp32_and_closer_to_an_fp32_model(kind: str) -> None:
    exact = _hidden({}, False)
    plain, wide = _hidden({kind: True}, False), _hidden({kind: True}, True)
    assert (plain.dtype, wide.dtype) == (torch.bfloat16 if kind == "bf16" else torch.float16, torch.float32)
    assert (wide - exact).norm() < 0.9 * (plain - exact).norm()


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_model_learns(normalization: str) -> None:
    model = {"fp32_residual_connection": True, "normalization": normalization, "num_layers": 2}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
    trace = tiny_run({"model": model, "precision": {"bf16": True}}, 20)
    assert trace.losses[-1] < trace.losses[0] - 0.3
    again = tiny_run({"model": model, "precision": {"bf16": True}, "recompute": recompute}, 4)
    assert again.losses == trace.losses[:4]


@pytest.mark.parametrize("precision", [{}, {"fp64": True}])
def test_models_in_fp32_and_fp64_are_unchanged(precision: dict[str, bool]) -> None:
    plain = tiny_run({"precision": precision}, 2)
    assert tiny_run({"precision": precision, "model": {"fp32_residual_connection": True}}, 2) == plain


def test_the_flag_is_accepted_alone() -> None:
    assert tiny_config({"model": {"fp32_residual_connection": True}, "precision": {"fp16": True}}, 1)
    with pytest.raises(UserError, match="neither true nor false"):
        tiny_config({"model": {"fp32_residual_connection": "perhaps"}}, 1)
