"""MLPs, their activations, and replicated linear layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.context import ForwardContext
from megatron.models.rank_context import RankContext
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule

_gelu_tanh = partial(F.gelu, approximate="tanh")


@dataclass(frozen=True)
class _Gated:
    """Gated activation of (..., gate and value): ``activate(gate) * value``.

    Args:
        activate: activation of the gate.
        backward: gradient of ``activate``, an operator of (gradient, gate) that writes to ``grad_input``.
    """

    activate: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not x.requires_grad:
            return self.compute(x)
        result: Tensor = _GatedFunction.apply(x, self)
        return result

    def compute(self, x: Tensor) -> Tensor:
        """Compute the activation with autograd's gradient."""
        gate, value = x.chunk(2, dim=-1)
        return self.activate(gate) * value


class _GatedFunction(torch.autograd.Function):
    """Gated activation with its gradient written in place: autograd would concatenate the two halves with a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: _Gated) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        open_gate = activation.activate(gate)
        ctx.save_for_backward(x, open_gate)
        ctx.activation = activation
        return open_gate * value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, open_gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return torch.autograd.grad(ctx.activation.compute(x), x, grad, create_graph=True)[0], None
        (gate, value), grad_x = x.chunk(2, dim=-1), torch.empty_like(x)
        grad_gate, grad_value = grad_x.chunk(2, dim=-1)
        torch.mul(grad, open_gate, out=grad_value)
        ctx.activation.backward(grad * value, gate, grad_input=grad_gate)
        return grad_x, None


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": _Gated(F.silu, torch.ops.aten.silu_backward.grad_input),
    "geglu": _Gated(_gelu_tanh, partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")),
}


class ReplicatedLinear(ShardedModule):
    """Linear layer, replicated on tensor-parallel ranks: (..., h) -> (..., out).

    Under sequence parallelism each rank sees a slice of the sequence, so parameter gradients are partial sums.
    """

    def __init__(self, rank: RankContext, out_features: int, bias: bool = True) -> None:
        super().__init__()
        shape = (out_features, rank.config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=rank.device, dtype=rank.dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=rank.device, dtype=rank.dtype)) if bias else None
        for name, param in self.named_parameters():
            self.specs[name] = ParamSpec(tuple(param.shape), partial_grad=rank.tensor.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MLP(ShardedModule):
    """Feed-forward part: (s, b, h) -> (s, b, h), and the output bias, which the caller adds.

    The gate and value of a gated MLP are two stacked projections, each split over the ranks, so that the logical weight
    (2, ffn, h) does not depend on the number of ranks.
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
