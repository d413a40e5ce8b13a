"""Gated activations with a hand-written gradient, against autograd of the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.mlp import ACTIVATIONS


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def _geglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * value


PLAIN = {"swiglu": _swiglu, "geglu": _geglu}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16), (3, 2, 24), (0, 8)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_gated_activations_match_autograd_to_the_bit(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], contiguous: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    x = (x if contiguous else x.mT.contiguous().mT).requires_grad_()
    grad = torch.randn_like(PLAIN[name](x))
    out, expected = ACTIVATIONS[name](x), PLAIN[name](x)
    assert torch.equal(out, expected)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (out, expected)))
    assert torch.equal(ACTIVATIONS[name](x.detach()), expected)


@pytest.mark.parametrize("name", PLAIN)
def test_gated_activations_have_second_derivatives(name: str) -> None:
    x = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ACTIVATIONS[name], (x,))
