"""Linear layers from 8-bit numbers: outputs and gradients against products in fp64 of numbers rounded by hand."""

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
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
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
    """The numbers of a matrix as 8 bits and their scales hold them, in fp64."""
    most = x.abs().amax(dim=1) if by_rows else x.abs().amax().expand(len(x))
    scales = torch.tensor([scale(float(m), dtype) for m in most], dtype=torch.float64).unsqueeze(1)
    return nearest(x.double() / scales, dtype) * scales


def _gradients(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and the input's gradient; the parameters' are left in them."""
    given = x.clone().requires_grad_()
    out = layer(given)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    assert given.grad is not None
    return out.detach(), given.grad


def _close(found: Tensor | None, wanted: Tensor) -> None:
    """To bf16's rounding, and fp32's of sums."""
    assert found is not None
    torch.testing.assert_close(found.double().view(wanted.shape), wanted, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["column", "column without bias", "row"])
def test_all_products_are_those_of_the_rounded_numbers(recipe: Any, kind: str) -> None:
    layer: ColumnParallelLinear | RowParallelLinear
    if kind == "row":
        layer = RowParallelLinear(IN, OUT, True, _comm(), CPU, torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(noise(OUT, IN, 7))
    else:
        layer = _column(bias=kind == "column")
    layer.compute_in_fp8(recipe)
    # Tokens of very different sizes: what one scale holds, and what one for each row does.
    x, grad = noise(S * B, IN, 1) * torch.logspace(-3, 0, S * B).bfloat16().unsqueeze(1), noise(S * B, OUT, 2)
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_of_any_size_keep_their_digits_where_each_has_a_scale(recipe: Any) -> None:
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
@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_reaches_the_gradients(recipe: Any, strange: float) -> None:
    layer = _column()
    layer.compute_in_fp8(recipe)
    grad = noise(S * B, OUT, 2)
    grad[3, 5] = strange
    _, grad_x = _gradients(layer, noise(S * B, IN, 1).view(S, B, IN), grad.view(S, B, OUT))
    assert grad_x.view(S * B, IN)[3].isnan().all()
    assert layer.weight.grad is not None
    assert not layer.weight.grad[5].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_that_do_not_suit_stay_as_they_were(recipe: Any) -> None:
    for outputs, tokens in ((40, (4, 4)), (32, (3, 5))):
        plain, small = _column(outputs=outputs), _column(outputs=outputs)
        small.compute_in_fp8(recipe)
        x, grad = noise(tokens[0] * tokens[1], IN, 1), noise(tokens[0] * tokens[1], outputs, 2)
        found, wanted = (
            _gradients(layer, x.view(*tokens, IN), grad.view(*tokens, outputs)) for layer in (small, plain)
        )
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
    suits, same = _column(), _column()
    suits.compute_in_fp8(recipe)
    x = noise(16, IN, 1).view(4, 4, IN)
    assert not torch.equal(suits(x), same(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_leaves_embedding_and_head_as_they_are(recipe: str) -> None:
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


def test_scales_begin_where_their_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the middle of another tensor's: matrix units may ask for aligned ones."""
    given: list[Tensor] = []

    def product(a: fp8.Quantized, b: fp8.Quantized, *args: Any, **kwargs: Any) -> Tensor:
        given.extend((a.scale, b.scale))
        return fp8.reference_product(a, b)

    monkeypatch.setattr(fp8, "scaled_product", product)
    for recipe, products in (("tensorwise", 3), ("rowwise", 2)):
        given.clear()
        layer = _column(bias=False)
        layer.compute_in_fp8(recipe)  # type: ignore[arg-type]
        _gradients(layer, noise(S * B, IN, 1).view(S, B, IN), noise(S * B, OUT, 2).view(S, B, OUT))
        assert [scale.storage_offset() for scale in given] == [0] * 2 * products
