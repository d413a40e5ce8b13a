"""The feed-forward part of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.comm.tensor import TensorComm
from megatron.config.model import ModelConfig
from megatron.model.context import ForwardContext
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.shards import ShardedModule


class _SwiGLU(torch.autograd.Function):
    """SwiGLU whose gradient is written in one piece: autograd would copy both halves of it together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        open_gate = F.silu(gate)
        ctx.save_for_backward(x, open_gate)
        return open_gate * value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, open_gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is itself differentiated
            return torch.autograd.grad(_swiglu_of_parts(x), x, grad, create_graph=True)[0]
        (gate, value), grad_x = x.chunk(2, dim=-1), torch.empty_like(x)
        grad_gate, grad_value = grad_x.chunk(2, dim=-1)
        torch.mul(grad, open_gate, out=grad_value)
        torch.ops.aten.silu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return grad_x


def _swiglu_of_parts(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def _swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value for x (..., gate and value)."""
    if torch.compiler.is_compiling() or not x.requires_grad:
        return _swiglu_of_parts(x)
    result: Tensor = _SwiGLU.apply(x)
    return result


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": _swiglu,
}


class MLP(ShardedModule):
    """Feed-forward part: (s, b, h) -> (s, b, h), and the bias still to be added.

    SwiGLU's gate and value are two stacked projections, each split over the ranks, so that its logical weight
    (2, ffn, h) does not depend on their number.
    """

    def __init__(self, config: ModelConfig, comm: TensorComm, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        shape: tuple[int, ...] = (config.ffn_hidden_size, config.hidden_size)
        if config.swiglu:
            shape = (2, *shape)
        self.activation = ACTIVATIONS[config.activation]
        self.dense_h_to_4h = ColumnParallelLinear(shape, config.add_bias_linear, comm, device, dtype)
        self.dense_4h_to_h = RowParallelLinear(
            config.ffn_hidden_size, config.hidden_size, config.add_bias_linear, comm, device, dtype
        )

    def forward(self, x_sbh: Tensor, context: ForwardContext | None = None) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x_sbh)))
        return result
