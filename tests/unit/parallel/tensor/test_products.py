"""8-bit linear layers: outputs and gradients against fp64 products of rounded numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.kernels import fp8
from megatron.models.gpt import GPTStage
from megatron.parallel.data.buffer import FlatBuffer, NamedParam
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.main_grad import WeightGrads
from megatron.parallel.tensor.shards import ParamSpec
from tests.support.tiny import tiny_engines
from tests.unit.kernels.test_fp8 import nearest, noise, scale

CPU = torch.device("cpu")
S, B, IN, OUT = 8, 4, 48, 32
RECIPES: list[Any] = ["tensorwise", "rowwise"]
GRADIENT = {"tensorwise": torch.float8_e5m2, "rowwise": torch.float8_e4m3fn}


def _comm() -> TensorComm:
    return TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))


def _column(bias: bool = True, outputs: int = OUT) -> ColumnParallelLinear:
    layer = ColumnParallelLinear((outputs, IN), bias, _comm(), CPU, torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(noise(outputs, IN, 7))
        if layer.bias is not None:
            layer.bias.copy_(noise(1, outputs, 8)[0])
    return layer


def rounded(x: Tensor, dtype: torch.dtype, by_rows: bool) -> Tensor:
    """Matrix rounded to 8 bits with scales, in fp64."""
    most = x.abs().amax(dim=1) if by_rows else x.abs().amax().expand(len(x))
    scales = torch.tensor([scale(float(m), dtype) for m in most], dtype=torch.float64).unsqueeze(1)
    return nearest(x.double() / scales, dtype) * scales


def _gradients(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input; gradients of parameters stay in the layer."""
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def _close(actual: Tensor | None, expected: Tensor) -> None:
    """Compare to the rounding of bf16, and of fp32 sums."""
    assert actual is not None
    torch.testing.assert_close(actual.double().view(expected.shape), expected, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["column", "column without bias", "row"])
def test_all_products_use_the_rounded_numbers(recipe: Any, kind: str) -> None:
    layer: ColumnParallelLinear | RowParallelLinear
    if kind == "row":
        layer = RowParallelLinear(IN, OUT, True, _comm(), CPU, torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(noise(OUT, IN, 7))
    else:
        layer = _column(bias=kind == "column")
    layer.compute_in_fp8(recipe)
    # Tokens of very different magnitudes tell a scale per tensor from scales per row; x and W have different scales.
    x, grad = 16 * noise(S * B, IN, 1) * torch.logspace(-3, 0, S * B).bfloat16().unsqueeze(1), noise(S * B, OUT, 2)
    grad = grad * torch.logspace(0, -6, S * B).bfloat16().unsqueeze(1)
    out, grad_x = _gradients(layer, x.view(S, B, IN), grad.view(S, B, OUT))
    rows, w, e4m3 = recipe == "rowwise", layer.weight.detach(), torch.float8_e4m3fn
    own_x, own_grad = rounded(x, e4m3, rows), rounded(grad, GRADIENT[recipe], rows)
    bias = 0.0 if layer.bias is None else layer.bias.detach().double()
    _close(out, own_x @ rounded(w, e4m3, rows).t() + bias)
    _close(grad_x, own_grad @ rounded(w.t(), e4m3, rows).t())
    _close(layer.weight.grad, (grad if rows else own_grad).double().t() @ (x if rows else own_x).double())
    if layer.bias is not None:
        _close(layer.bias.grad, grad.double().sum(0))


@pytest.mark.parametrize(("recipe", "bytes_per_number"), [(None, 2), ("tensorwise", 1), ("rowwise", 2)])
def test_weight_passes_take_the_numbers_of_their_product(recipe: Any, bytes_per_number: int) -> None:
    """Records have 8 bits where the product has, and give the gradient of a backward pass without records."""
    x, grad = noise(S * B, IN, 1).view(S, B, IN), noise(S * B, OUT, 2).view(S, B, OUT)
    joint, recorded = _column(bias=False), _column(bias=False)
    for layer in (joint, recorded):
        layer.compute_in_fp8(recipe)
    _gradients(joint, x, grad)
    weight_grads, specs = WeightGrads(), [NamedParam("w", "w", ParamSpec((OUT, IN)), recorded.weight)]
    buffer = FlatBuffer(specs, torch.bfloat16, single_process("cpu").dp, 1, weight_grads=weight_grads)
    buffer.begin_grads()
    weight_grads.begin_step(separate=True)
    with weight_grads.recording(0):
        _gradients(recorded, x, grad)
    scales = 2 * 4 if recipe == "tensorwise" else 0
    assert sum(x.nbytes for x in weight_grads.tensors(0)) == S * B * (IN + OUT) * bytes_per_number + scales
    weight_grads.compute(0)
    buffer.complete_grads()
    assert joint.weight.grad is not None
    assert torch.equal(buffer.grads_flat[: OUT * IN].view(OUT, IN), joint.weight.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_small_tokens_survive_with_scales_per_row(recipe: Any) -> None:
    layer = _column(bias=False)
    layer.compute_in_fp8(recipe)
    x = noise(S * B, IN, 1)
    x[1:] *= 2.0**-30
    out = layer(x.view(S, B, IN)).detach().view(S * B, OUT)
    assert bool((out[1:] != 0).all()) == (recipe == "rowwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_give_zeros(recipe: Any) -> None:
    layer = _column(bias=False)
    layer.compute_in_fp8(recipe)
    out, grad_x = _gradients(layer, torch.zeros(S, B, IN).bfloat16(), torch.zeros(S, B, OUT).bfloat16())
    for zeros in (out, grad_x, layer.weight.grad):
        assert zeros is not None
        assert not zeros.any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_numbers_reach_the_gradients(recipe: Any, bad: float) -> None:
    layer = _column()
    layer.compute_in_fp8(recipe)
    grad = noise(S * B, OUT, 2)
    grad[3, 5] = bad
    _, grad_x = _gradients(layer, noise(S * B, IN, 1).view(S, B, IN), grad.view(S, B, OUT))
    assert grad_x.view(S * B, IN)[3].isnan().all()
    assert layer.weight.grad is not None
    assert not layer.weight.grad[5].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_unsupported_sizes_use_plain_products(recipe: Any) -> None:
    for outputs, tokens in ((40, (4, 4)), (32, (3, 5))):
        plain, small = _column(outputs=outputs), _column(outputs=outputs)
        small.compute_in_fp8(recipe)
        x, grad = noise(tokens[0] * tokens[1], IN, 1), noise(tokens[0] * tokens[1], outputs, 2)
        actual, expected = (
            _gradients(layer, x.view(*tokens, IN), grad.view(*tokens, outputs)) for layer in (small, plain)
        )
        for result, other in zip(actual, expected, strict=True):
            assert torch.equal(result, other)
    suits, same = _column(), _column()
    suits.compute_in_fp8(recipe)
    x = noise(16, IN, 1).view(4, 4, IN)
    assert not torch.equal(suits(x), same(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_embedding_and_head_of_a_model_stay_in_bf16(recipe: str) -> None:
    (stage,) = tiny_engines({"precision": {"bf16": True, "fp8": recipe}}).stages
    linear = [module for module in stage.modules() if hasattr(module, "compute_in_fp8")]
    assert {type(module).__name__ for module in linear if module is not stage} == {
        "ColumnParallelLinear",
        "RowParallelLinear",
    }
    assert len(linear) == 1 + 4 * stage.config.num_layers
    (plain,) = tiny_engines({"precision": {"bf16": True}}).stages
    assert isinstance(stage, GPTStage)
    assert isinstance(plain, GPTStage)
    x = noise(16, stage.config.hidden_size, 3).unsqueeze(1)
    assert torch.equal(stage.logits(x), plain.logits(x))


def test_scales_start_at_the_beginning_of_their_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix units may need aligned scales."""
    scales: list[Tensor] = []

    def product(a: fp8.Quantized, b: fp8.Quantized, *args: Any, **kwargs: Any) -> Tensor:
        scales.extend((a.scale, b.scale))
        return fp8.reference_product(a, b)

    monkeypatch.setattr(fp8, "scaled_product", product)
    for recipe, products in (("tensorwise", 3), ("rowwise", 2)):
        scales.clear()
        layer = _column(bias=False)
        layer.compute_in_fp8(recipe)  # type: ignore[arg-type]
        _gradients(layer, noise(S * B, IN, 1).view(S, B, IN), noise(S * B, OUT, 2).view(S, B, OUT))
        assert [scale.storage_offset() for scale in scales] == [0] * 2 * products
