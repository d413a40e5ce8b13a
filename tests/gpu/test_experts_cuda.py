"""Layers with experts on a CUDA device: layouts over NCCL, and products of all experts in a single call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.resolve_model import resolve_model
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.models.context import ForwardContext
from megatron.models.experts import Experts
from megatron.models.rank_context import RankContext
from megatron.parallel.tensor.collectives import TensorComm
from tests.multiprocess import test_experts as experts

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(400)  # the ranks may take 300 s
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["2", "2, others", "4"])
def test_layouts_agree(name: str) -> None:
    experts.test_layouts_agree(name)


def _layer(dtype: torch.dtype, **form: Any) -> Experts:
    """A layer with experts of random weights."""
    device, config = torch.device("cuda"), resolve_model(ModelConfig(num_layers=1, num_attention_heads=4, **form))
    comm = TensorComm(single_process(device).tp, Ledger(), CompressionPlan({}))
    layer = Experts(RankContext(config, comm, device, dtype), 0)
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.05)
    return layer


def _loop(rows: torch.Tensor, weights: Sequence[torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
    chunks = rows.split(counts.tolist())
    return torch.cat([chunk @ weight.t() for chunk, weight in zip(chunks, weights, strict=True)])


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_all_experts_are_those_of_a_loop(biases: bool, dtype: torch.dtype) -> None:
    """Of so many rows that gradients of biases would lose digits if they were added row by row in bf16."""
    form = {"hidden_size": 256, "seq_length": 1024, "num_experts": [16]}
    layer = _layer(dtype, **form, swiglu=not biases, add_bias_linear=biases)
    x_sbh = torch.randn(1024, 4, 256, device="cuda", dtype=dtype)
    results = []
    for loop in (False, True):
        x = x_sbh.clone().requires_grad_()
        layer.zero_grad()
        with (
            mock.patch("megatron.models.experts.supports_grouped_products", lambda rows, weights, off=loop: not off),
            mock.patch("megatron.models.experts.batched_linear", _loop),
        ):
            out_sbh, _ = layer(x, ForwardContext())
        out_sbh.float().square().sum().backward()
        results.append([out_sbh.detach(), x.grad, *(param.grad for param in layer.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert actual is not None
        assert expected is not None
        error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
        assert float(error) < (1e-4 if dtype is torch.float32 else 0.02)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 64), (torch.bfloat16, 1364)])
def test_types_and_widths_that_torch_cannot_group(dtype: torch.dtype, width: int) -> None:
    form = {"hidden_size": 64, "seq_length": 32, "num_experts": [8], "moe_ffn_hidden_size": width}
    layer = _layer(dtype, **form, swiglu=True, add_bias_linear=False)
    x_sbh = torch.randn(32, 2, 64, device="cuda", dtype=dtype)
    out_sbh, _ = layer(x_sbh, ForwardContext())
    with mock.patch("megatron.models.experts.batched_linear", _loop):
        wanted_sbh, _ = layer(x_sbh, ForwardContext())
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-10
    torch.testing.assert_close(out_sbh, wanted_sbh, rtol=tolerance, atol=tolerance)
