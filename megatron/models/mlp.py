"""MLPs and their activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.context import ForwardContext
from megatron.models.rank_context import RankContext
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.shards import ShardedModule

_gelu_tanh = partial(F.gelu, approximate="tanh")


@dataclass(frozen=True)
class _Gated:
    """Gated activation of (..., gate and value): ``opened(gate) * value``.

    Args:
        opened: activation of the gate.
        backward: gradient of ``opened``, an operator of (gradient, gate) that writes to ``grad_input``.
    """

    opened: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not x.requires_grad:
            return self.of_parts(x)
        result: Tensor = _InOnePiece.apply(x, self)
        return result

    def of_parts(self, x: Tensor) -> Tensor:
        """Compute the activation with autograd's gradient."""
        gate, value = x.chunk(2, dim=-1)
        return self.opened(gate) * value


class _InOnePiece(torch.autograd.Function):
    """Gated activation with its gradient written in place: autograd would concatenate the two halves with a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: _Gated) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        open_gate = form.opened(gate)
        ctx.save_for_backward(x, open_gate)
        ctx.form = form
        return open_gate * value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, open_gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return torch.autograd.grad(ctx.form.of_parts(x), x, grad, create_graph=True)[0], None
        (gate, value), grad_x = x.chunk(2, dim=-1), torch.empty_like(x)
        grad_gate, grad_value = grad_x.chunk(2, dim=-1)
        torch.mul(grad, open_gate, out=grad_value)
        ctx.form.backward(grad * value, gate, grad_input=grad_gate)
        return grad_x, None


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": _Gated(F.silu, torch.ops.aten.silu_backward.grad_input),
    "geglu": _Gated(_gelu_tanh, partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")),
}


class MLP(ShardedModule):
    """Feed-forward part: (s, b, h) -> (s, b, h), and the bias to be added by the caller.

    A gated MLP's gate and value are two stacked projections, each split over the ranks, so that its logical weight
    (2, ffn, h) does not depend on their number.
    """

    def __init__(self, rank: RankContext) -> None:
        super().__init__()
        config = rank.config
        shape: tuple[int, ...] = (config.ffn_hidden_size, config.hidden_size)
        if config.gated:
            shape = (2, *shape)
        self.activation = ACTIVATIONS[config.activation]
        self.dense_h_to_4h = ColumnParallelLinear(shape, config.add_bias_linear, rank.tensor, rank.device, rank.dtype)
        self.dense_4h_to_h = RowParallelLinear(
            config.ffn_hidden_size, config.hidden_size, config.add_bias_linear, rank.tensor, rank.device, rank.dtype
        )

    def forward(self, x_sbh: Tensor, context: ForwardContext | None = None) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x_sbh)))
        return result
