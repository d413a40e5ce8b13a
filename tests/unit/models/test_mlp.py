"""Gated functions, whose gradient is their own: autograd's of the plain formula as the oracle."""

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
def test_a_gated_function_and_its_gradient_are_autograds_to_the_bit(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], contiguous: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    x = (x if contiguous else x.mT.contiguous().mT).requires_grad_()
    grad = torch.randn_like(PLAIN[name](x))
    found = []
    for form in (ACTIVATIONS[name], PLAIN[name]):
        out = form(x)
        found.append((out, *torch.autograd.grad(out, x, grad)))
    for own, wanted in zip(*found, strict=True):
        assert torch.equal(own, wanted)
    assert torch.equal(ACTIVATIONS[name](x.detach()), found[1][0])


@pytest.mark.parametrize("name", PLAIN)
def test_a_gated_function_has_second_derivatives(name: str) -> None:
    x = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ACTIVATIONS[name], (x,))
