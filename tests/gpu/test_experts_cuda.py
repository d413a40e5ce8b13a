"""Layers with experts on a CUDA device: layouts over NCCL, and products of all experts in one call."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.comm.tensor import TensorComm
from megatron.config.model import ModelConfig, resolve_model
from megatron.model.context import ForwardContext
from megatron.model.experts import Experts
from megatron.topology.topology import single_process
from tests.multiprocess import test_experts as experts

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(400)  # the ranks may take 300 s
@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts_agree(world_size: int) -> None:
    experts.test_layouts_agree(world_size)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_all_experts_are_those_of_a_loop(biases: bool, dtype: torch.dtype) -> None:
    """Of so many rows that gradients of biases would lose digits if they were added row by row in bf16."""
    config = resolve_model(
        ModelConfig(
            num_layers=1,
            hidden_size=256,
            num_attention_heads=4,
            seq_length=1024,
            num_experts=[16],
            swiglu=not biases,
            add_bias_linear=biases,
        )
    )
    device = torch.device("cuda")
    comm = TensorComm(single_process(device).tp, Ledger(), CompressionPlan({}))
    layer = Experts(config, 0, comm, device, dtype)
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.05)
    x_sbh = torch.randn(1024, 4, 256, device=device, dtype=dtype)
    found = []
    for loop in (False, True):
        given = x_sbh.clone().requires_grad_()
        layer.zero_grad()
        with mock.patch("megatron.model.experts.groups_products", lambda rows, weights, off=loop: not off):
            out_sbh, _ = layer(given, ForwardContext())
        out_sbh.float().square().sum().backward()
        found.append([out_sbh.detach(), given.grad, *(param.grad for param in layer.parameters())])
    for own, wanted in zip(*found, strict=True):
        assert own is not None
        assert wanted is not None
        error = (own.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-6)
        assert float(error) < (1e-4 if dtype is torch.float32 else 0.02)
