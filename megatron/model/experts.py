"""Experts: a layer's feed-forward part as many MLPs, of which each token goes through a few.

Tokens are sorted by expert, sent to the ranks that hold the experts, and come back to be added up by their weights
(GShard, Lepikhin et al. 2020). An expert's inner width is split over the tensor-parallel ranks like that of an MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.base.option import is_unset
from megatron.comm.experts import ExpertComm, Leg
from megatron.comm.tensor import TensorComm, enter_parallel_region, leave_parallel_region
from megatron.compression.points import Point
from megatron.config.model import ModelConfig
from megatron.model.context import ForwardContext
from megatron.model.mlp import ACTIVATIONS, MLP
from megatron.model.router import Router, Routing
from megatron.parallel.tensor.grouped import grouped_linear, groups_products
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule, with_partial_grad


@dataclass(frozen=True)
class _Order:
    """The order of a micro-batch's rows by expert: one row for each expert that takes a token.

    Args:
        token: token of each row.
        place: by (token, k), flat: its row; the number of rows where no expert takes it.
        counts: rows of each expert, int64.
        k: experts of a token.
    """

    token: Tensor
    place: Tensor
    counts: Tensor
    k: int

    @property
    def dropped(self) -> bool:
        """Whether there are fewer rows than choices."""
        return len(self.token) < len(self.place)

    def by_token(self, rows: Tensor) -> Tensor:
        """Rows (r, h) as (tokens, k, h), with zeros where no expert took the token."""
        if self.dropped:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return rows.index_select(0, self.place).view(-1, self.k, rows.shape[1])


def _order(routing: Routing, experts: int, comm: ExpertComm) -> _Order:
    chosen, k = routing.experts_tk.flatten(), routing.experts_tk.shape[1]
    if routing.kept_tk is not None:
        chosen = torch.where(routing.kept_tk.flatten(), chosen, experts)
    counts = comm.count(chosen, experts, routing.capacity)
    order = chosen.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    if routing.kept_tk is not None:
        rows = int(counts.sum())
        order, place = order[:rows], place.clamp_(max=rows)
    return _Order(order // k, place, counts, k)


class _Dispatch(torch.autograd.Function):
    """Tokens (t, h) to rows (r, h) by expert; a token's gradient is the sum of its rows', in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_th: Tensor, order: _Order) -> Tensor:
        ctx.order = order
        return x_th.index_select(0, order.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.order.by_token(grad).sum(1), None


class _Combine(torch.autograd.Function):
    """Rows (r, h) by expert to tokens (s, b, h): the weighted sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights_tk: Tensor, order: _Order, samples: int) -> Tensor:
        ctx.save_for_backward(rows, weights_tk)
        ctx.order = order
        tokens, hidden = len(weights_tk), rows.shape[1]
        # No view in autograd's eyes: the sum over tensor-parallel ranks works in place.
        out_sbh = rows.new_empty(tokens // samples, samples, hidden)
        weights_t1k = weights_tk.unsqueeze(1).to(rows.dtype)
        torch.bmm(weights_t1k, order.by_token(rows), out=out_sbh.view(tokens, 1, hidden))
        return out_sbh

    @staticmethod
    def backward(ctx: Any, grad_sbh: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights_tk = ctx.saved_tensors
        order: _Order = ctx.order
        grad_th = grad_sbh.flatten(0, 1)
        grad_weights = torch.bmm(order.by_token(rows), grad_th.unsqueeze(2)).squeeze(2)
        by_row = weights_tk.new_empty(len(rows) + 1)
        by_row[order.place] = weights_tk.flatten()
        grad_rows = grad_th.index_select(0, order.token) * by_row[:-1].unsqueeze(1).to(rows.dtype)
        return grad_rows, grad_weights.to(weights_tk.dtype), None, None


class Expert(nn.Module):
    """The weights of one expert, of which each tensor-parallel rank has a part of the inner width."""

    def __init__(self, config: ModelConfig, comm: TensorComm, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        shape: tuple[int, ...] = (2, width, hidden) if config.swiglu else (width, hidden)
        self.comm = comm
        self.activation = ACTIVATIONS[config.activation]
        self.dense_h_to_4h = ColumnParallelLinear(shape, config.add_bias_linear, comm, device, dtype)
        self.dense_4h_to_h = RowParallelLinear(width, hidden, config.add_bias_linear, comm, device, dtype)
        if config.add_bias_linear and comm.size > 1:
            # The first rank alone adds it: outputs are weighted before the ranks' parts are added up.
            self.dense_4h_to_h.specs["bias"] = with_partial_grad(ParamSpec((hidden,)))
        for layer in (self.dense_h_to_4h, self.dense_4h_to_h):
            layer.specs = {name: replace(spec, of_expert=True) for name, spec in layer.specs.items()}

    @property
    def up(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the first product."""
        layer = self.dense_h_to_4h
        return layer.weight.flatten(0, -2), None if layer.bias is None else layer.bias.flatten()

    @property
    def down(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the second product, of which tensor-parallel ranks have parts that are added up."""
        bias = self.dense_4h_to_h.bias
        return self.dense_4h_to_h.weight, None if bias is None else bias if self.comm.rank == 0 else bias * 0.0

    def forward(self, rows: Tensor) -> Tensor:
        """Rows (r, h) to this tensor-parallel rank's part of the outputs' sum."""
        return F.linear(self.activation(F.linear(rows, *self.up)), *self.down)


def _grouped(rows: Tensor, layers: Sequence[tuple[Tensor, Tensor | None]], counts: Tensor) -> Tensor:
    """The linear layers of all experts, each of its own rows."""
    out = grouped_linear(rows.contiguous(), [weight for weight, _ in layers], counts)
    biases = [bias for _, bias in layers if bias is not None]
    if not biases:
        return out
    return out + torch.stack(biases).repeat_interleave(counts.to(rows.device), dim=0, output_size=len(rows))


class _Coefficients(ShardedModule):
    """A linear layer of few outputs that every tensor-parallel rank has: (s, b, h) -> (s, b, outputs)."""

    def __init__(
        self, config: ModelConfig, outputs: int, bias: bool, comm: TensorComm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, config.hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(outputs, device=device, dtype=dtype)) if bias else None
        for name, param in self.named_parameters():
            spec = ParamSpec(tuple(param.shape))
            self.specs[name] = with_partial_grad(spec) if comm.sequence_parallel else spec

    def forward(self, x_sbh: Tensor) -> Tensor:
        return F.linear(x_sbh, self.weight, self.bias)


class Experts(nn.Module):
    """The feed-forward part of a layer with experts: (s, b, h) -> (s, b, h); no bias is left to be added.

    Args:
        config: the model.
        layer: number of the layer.
        comm: the tensor-parallel points, and the expert-parallel ones.
        device, dtype: those of the parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.comm = config, layer, comm
        self.expert_comm = comm.experts
        self.count = config.expert_layers[layer]
        self.local = self.count // comm.experts.size
        first = comm.experts.group.rank * self.local
        self.router = Router(config, layer, self.count, comm, device, dtype)
        self.experts = nn.ModuleDict(
            {str(number): Expert(config, comm, device, dtype) for number in range(first, first + self.local)}
        )
        self.shared: MLP | None = None
        self.mixing: _Coefficients | None = None
        width = config.ffn_hidden_size if config.mlp_type == "residual" else config.moe_shared_expert_intermediate_size
        if not is_unset(width):
            self.shared = MLP(replace(config, ffn_hidden_size=width), comm, device, dtype)
            if config.mlp_type == "residual":
                self.mixing = _Coefficients(config, 2, True, comm, device, dtype)
            elif config.moe_shared_expert_gate:
                self.mixing = _Coefficients(config, 1, False, comm, device, dtype)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        routing = self.router(x_sbh, context)
        full_sbh = enter_parallel_region(x_sbh, self.comm)
        out_sbh = leave_parallel_region(self._routed(full_sbh, routing), self.comm)
        if self.shared is not None:
            out_sbh = self._mixed(out_sbh, x_sbh)
        return self._with_losses(out_sbh, routing, context), None

    def _routed(self, x_sbh: Tensor, routing: Routing) -> Tensor:
        """The experts' outputs, or this tensor-parallel rank's part of their sum."""
        order = _order(routing, self.count, self.expert_comm)
        rows: Tensor = _Dispatch.apply(x_sbh.flatten(0, 1), order)
        if self.expert_comm.size == 1:
            rows = self._compute(rows, order.counts)
        else:
            counts_re = order.counts.view(self.expert_comm.size, self.local)
            came_re = self.expert_comm.exchange_counts(counts_re)
            sent, received = (tuple(counts.sum(1).tolist()) for counts in (counts_re, came_re))
            there = Leg(Point.EP_DISPATCH_FWD, Point.EP_DISPATCH_BWD, sent, received)
            back = Leg(Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD, received, sent)
            rows = self.expert_comm.move(self._computed_of_ranks(self.expert_comm.move(rows, there), came_re), back)
        result: Tensor = _Combine.apply(rows, routing.weights_tk, order, x_sbh.shape[1])
        return result

    def _computed_of_ranks(self, rows: Tensor, came_re: Tensor) -> Tensor:
        """The outputs of rows that came rank by rank, each rank's by expert; in the same order."""
        numbers = torch.arange(self.local, device=rows.device).repeat(len(came_re))
        repeats = came_re.flatten().to(rows.device)
        order = numbers.repeat_interleave(repeats, output_size=len(rows)).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=rows.device)
        out = self._compute(rows.index_select(0, order), came_re.sum(0))
        return out.index_select(0, back)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs of rows that lie by expert. Experts without rows get gradients of zero."""
        experts = cast("list[Expert]", list(self.experts.values()))
        if groups_products(rows, experts[0].up[0]):
            inner = _grouped(rows, [expert.up for expert in experts], counts)
            return _grouped(experts[0].activation(inner), [expert.down for expert in experts], counts)
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])

    def _mixed(self, out_sbh: Tensor, x_sbh: Tensor) -> Tensor:
        """With the MLP beside the experts added."""
        assert self.shared is not None
        shared_sbh, bias = self.shared(x_sbh)
        if bias is not None:
            shared_sbh = shared_sbh + bias
        if self.mixing is None:
            return out_sbh + shared_sbh
        if self.config.mlp_type == "residual":
            share_sb2 = self.mixing(x_sbh).softmax(-1)
            return shared_sbh * share_sb2[..., :1] + out_sbh * share_sb2[..., 1:]
        return out_sbh + shared_sbh * self.mixing(x_sbh).sigmoid()

    def _with_losses(self, out_sbh: Tensor, routing: Routing, context: ForwardContext) -> Tensor:
        """The output, whose gradient brings that of the layer's own losses with it."""
        step, config = context.experts, self.config
        if step is None:
            return out_sbh
        counts = self.expert_comm.count(routing.experts_tk, self.count)
        step.seen[self.layer, step.micro_batch] = (counts, routing.losses.detach())
        given = tuple(config.expert_losses.values())
        if not any(given):
            return out_sbh
        weights = routing.losses.new_tensor(given)
        # Each tensor-parallel rank brings its part: the gradients of the router's logits are added up over them.
        objective = (routing.losses * weights).sum() / self.comm.size
        result: Tensor = _WithLoss.apply(out_sbh, objective, step.loss_grad)
        return result


class _WithLoss(torch.autograd.Function):
    """A tensor as it is; its backward also begins that of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, loss_grad: Tensor) -> Tensor:
        ctx.loss_grad = loss_grad.to(loss.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.loss_grad, None
