"""8-bit products on a CUDA device: the codes of the CPU, its products, and training by them."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.kernels import fp8
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.linear import ColumnParallelLinear
from megatron.training.assembly import Engines
from megatron.training.step import evaluation_step
from tests.support.device import VARIABLE, has_8_bit_units
from tests.support.tiny import tiny_batches, tiny_engines, tiny_train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_8_bit_units(), reason="no 8-bit units")]

RECIPES: list[Any] = ["tensorwise", "rowwise"]


def _noise(m: int, n: int, seed: int) -> torch.Tensor:
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x * torch.logspace(-9, 0, m).bfloat16().unsqueeze(1)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
def test_codes_and_products_are_the_cpus(dtype: torch.dtype, by_rows: bool) -> None:
    for m, k, n in ((16, 16, 16), (48, 160, 32), (512, 1024, 768), (4096, 2048, 1024)):
        a, b, bias = _noise(m, k, 1), _noise(n, k, 2), _noise(1, n, 3)[0]
        if by_rows and dtype == fp8.E5M2:
            continue  # no recipe has it
        results = []
        for device in ("cpu", "cuda"):
            left, other = a.to(device), b.to(device)
            qa = fp8.quantize(left, fp8.scale_of(fp8.largest(left, by_rows), dtype), dtype)
            qb = fp8.quantize(other, fp8.scale_of(fp8.largest(other, by_rows), fp8.E4M3), fp8.E4M3)
            outs = [fp8.scaled_product(qa, qb, bias_or_none) for bias_or_none in (None, bias.to(device))]
            results.append([x.cpu() for x in (qa.codes.view(torch.uint8), qa.scale, qb.scale, *outs)])
        for cpu, cuda in zip(results[0][:3], results[1][:3], strict=True):
            assert torch.equal(cpu, cuda)
        for cpu, cuda in zip(results[0][3:], results[1][3:], strict=True):
            # The units add the products of a step with fewer bits than fp32's.
            most = float(cpu.abs().amax())
            torch.testing.assert_close(cuda.float(), cpu.float(), rtol=2.0**-6, atol=most * 2.0**-10)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_and_its_gradients_are_the_cpus(recipe: Any) -> None:
    results = []
    for device in ("cpu", "cuda"):
        comm = TensorComm(single_process(device).tp, Ledger(), CompressionPlan({}))
        layer = ColumnParallelLinear((256, 128), True, comm, torch.device(device), torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(_noise(256, 128, 4))
        layer.compute_in_fp8(recipe)
        x = _noise(512, 128, 5).view(128, 4, 128).to(device).requires_grad_()
        out = layer(x)
        out.backward(_noise(512, 256, 6).view(128, 4, 256).to(device))
        assert x.grad is not None
        assert layer.weight.grad is not None
        results.append([t.detach().float().cpu() for t in (out, x.grad, layer.weight.grad)])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=2.0**-6, atol=float(cpu.abs().amax()) * 2.0**-8)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cuda")
    torch._dynamo.reset()
    counters.clear()


def _engines(recipe: str | None, **training: Any) -> Engines:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64}
    return tiny_engines({"precision": {"bf16": True, "fp8": recipe}, "model": sizes, "training": training})


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_are_one_graph(on_cuda: None, recipe: str) -> None:
    engines = _engines(recipe, compile="on")
    tiny_train(engines, 3)
    assert counters["stats"]["unique_graphs"] == 1
    evaluation_step(engines, list(islice(tiny_batches(engines.config, engines.topology, False), 2)))
    tiny_train(engines, 2)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_near_those_in_bf16(on_cuda: None, recipe: str) -> None:
    """The benchmark's section fp8 measures how near, over a thousand steps."""
    plain, eight = (tiny_train(_engines(kind, compile="off"), 40).losses for kind in (None, recipe))
    assert eight != plain
    assert eight[-1] < eight[0] - 0.3
    assert sum(eight[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.02)
