"""Mixture of experts: many MLPs as a layer's feed-forward part; each token is routed to a few of them.

Tokens are sorted by expert, dispatched to the ranks that hold the experts, and combined with their routing weights
(GShard, Lepikhin et al. 2020). As in an MLP, an expert's inner width is split over the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.base.option import is_unset
from megatron.compression.points import Point
from megatron.models.context import ForwardContext
from megatron.models.mlp import ACTIVATIONS, MLP, ReplicatedLinear
from megatron.models.rank_context import RankContext
from megatron.parallel.expert.dispatcher import ExpertComm, Leg
from megatron.parallel.expert.permutation import (
    Choices,
    decode_choices,
    group_choices_by_node,
    make_order,
    permute,
    unpermute,
)
from megatron.parallel.expert.router import Router, Routing
from megatron.parallel.tensor.collectives import enter_parallel_region, leave_parallel_region
from megatron.parallel.tensor.grouped import batched_linear, grouped_linear, round_up_rows, supports_grouped_products
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, linear
from megatron.parallel.tensor.shards import ParamSpec

GroupsLinear = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]
"""Grouped linear layers of rows sorted by group; see ``grouped_linear``."""


class Expert(nn.Module):
    """Weights of an expert.

    Args:
        rank: the model and its setting; each tensor-parallel rank holds a slice of the inner width.
        unshared: whether only this tensor-parallel rank holds the expert, with its full width.
    """

    def __init__(self, rank: RankContext, unshared: bool = False) -> None:
        super().__init__()
        config = rank.config
        comm = rank.tensor.without_tensor_parallelism() if unshared else rank.tensor
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        shape: tuple[int, ...] = (2, width, hidden) if config.gated else (width, hidden)
        self.comm = comm
        self.activation = ACTIVATIONS[config.activation]
        self.dense_h_to_4h = ColumnParallelLinear(shape, config.add_bias_linear, comm, rank.device, rank.dtype)
        self.dense_4h_to_h = RowParallelLinear(width, hidden, config.add_bias_linear, comm, rank.device, rank.dtype)
        if config.add_bias_linear and comm.size > 1:
            # Only the first rank adds the bias: outputs are weighted before they are summed over the ranks.
            self.dense_4h_to_h.specs["bias"] = ParamSpec((hidden,), partial_grad=True)
        for layer in (self.dense_h_to_4h, self.dense_4h_to_h):
            layer.specs = {name: replace(spec, of_expert=True) for name, spec in layer.specs.items()}
            if unshared:
                layer.specs = {name: replace(spec, dim=None, unshared=True) for name, spec in layer.specs.items()}

    @property
    def up(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the first projection."""
        layer = self.dense_h_to_4h
        return layer.weight.flatten(0, -2), None if layer.bias is None else layer.bias.flatten()

    @property
    def down(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the second projection; its outputs are summed over tensor-parallel ranks."""
        bias = self.dense_4h_to_h.bias
        return self.dense_4h_to_h.weight, None if bias is None else bias if self.comm.rank == 0 else bias * 0.0

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (r, h) to this tensor-parallel rank's partial outputs (r, h)."""
        return linear(self.activation(linear(rows, *self.up)), *self.down)


def _grouped_product(
    rows: Tensor, layers: Sequence[tuple[Tensor, Tensor | None]], counts: Tensor, multiply: GroupsLinear
) -> Tensor:
    """Apply each expert's linear layer to its rows."""
    out = multiply(rows.contiguous(), [weight for weight, _ in layers], counts)
    biases = [bias for _, bias in layers if bias is not None]
    if not biases:
        return out
    result: Tensor = _AddBiases.apply(out, torch.stack(biases), counts)
    return result


class _AddBiases(torch.autograd.Function):
    """Add the experts' biases (experts, n) to rows (r, n) sorted by expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, biases_en: Tensor, counts: Tensor) -> Tensor:
        numbers = torch.arange(len(biases_en), device=rows.device)
        expert_r = numbers.repeat_interleave(counts.to(rows.device), output_size=len(rows))
        ctx.save_for_backward(expert_r, numbers)
        return rows + biases_en.index_select(0, expert_r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        expert_r, numbers = ctx.saved_tensors
        if grad.is_cuda:  # matmul sums in fp32; index_add_ on CUDA sums in the output dtype and in no fixed order
            return grad, (expert_r == numbers.unsqueeze(1)).to(grad.dtype) @ grad, None
        return grad, grad.new_zeros(len(numbers), grad.shape[1]).index_add_(0, expert_r, grad), None


def _legs(sent: tuple[int, ...], received: tuple[int, ...], layer: int) -> tuple[Leg, Leg]:
    """Legs of dispatch and combine, from the number of rows sent to and received from each rank."""
    dispatch_leg = Leg(Point.EP_DISPATCH_FWD, Point.EP_DISPATCH_BWD, sent, received, layer)
    return dispatch_leg, Leg(Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD, received, sent, layer)


class Experts(nn.Module):
    """Feed-forward part of a layer with experts: (s, b, h) -> (s, b, h), biases included.

    Args:
        rank: the model, and the rank's communication and device.
        layer: number of the layer.
    """

    def __init__(self, rank: RankContext, layer: int) -> None:
        super().__init__()
        config = rank.config
        self.config, self.layer, self.comm = config, layer, rank.tensor
        self.expert_comm = rank.expert or ExpertComm.local(rank.tensor.ledger, rank.tensor.plan)
        self.count = config.expert_layers[layer]
        self.local = self.count // self.expert_comm.size
        first = self.expert_comm.group.rank * self.local
        self.router = Router(config, layer, self.count, rank.tensor, rank.device, rank.dtype)
        self.experts = nn.ModuleDict(
            {str(number): Expert(rank, self.expert_comm.folded) for number in range(first, first + self.local)}
        )
        self.shared: MLP | None = None
        self.mixing: ReplicatedLinear | None = None
        width = config.ffn_hidden_size if config.mlp_type == "residual" else config.moe_shared_expert_intermediate_size
        if not is_unset(width):
            self.shared = MLP(replace(rank.at("shared"), config=replace(config, ffn_hidden_size=width)))
            if config.mlp_type == "residual":
                self.mixing = ReplicatedLinear(rank, 2)
            elif config.moe_shared_expert_gate:
                self.mixing = ReplicatedLinear(rank, 1, bias=False)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
        routing = self.router(x_sbh, context.dropout, context.experts)
        if self.expert_comm.folded:
            # Each tensor-parallel rank dispatches its share of the tokens.
            comm = self.comm
            if comm.sequence_parallel:
                first = comm.rank * x_sbh.shape[0] * x_sbh.shape[1]
                token_slice = slice(first, first + x_sbh.shape[0] * x_sbh.shape[1])
                out_sbh = self._apply_experts(x_sbh, routing.slice_tokens(token_slice))
            else:
                x_th = enter_parallel_region(x_sbh, comm).flatten(0, 1)
                slice_length = -(-len(x_th) // comm.size)
                token_slice = slice(
                    min(comm.rank * slice_length, len(x_th)), min((comm.rank + 1) * slice_length, len(x_th))
                )
                out = self._apply_experts(x_th[token_slice].unsqueeze(1), routing.slice_tokens(token_slice)).squeeze(1)
                out_th = F.pad(out, (0, 0, token_slice.start, len(x_th) - token_slice.stop))
                out_sbh = leave_parallel_region(out_th.view_as(x_sbh), comm)
        else:
            full_sbh = enter_parallel_region(x_sbh, self.comm)
            out_sbh = leave_parallel_region(self._apply_experts(full_sbh, routing), self.comm)
        if self.shared is not None:
            shared_sbh, bias = self.shared(x_sbh)
            if bias is not None:
                shared_sbh = shared_sbh + bias
            if self.mixing is None:
                out_sbh = out_sbh + shared_sbh
            elif self.config.mlp_type == "residual":
                share_sb2 = self.mixing(x_sbh).softmax(-1)
                out_sbh = shared_sbh * share_sb2[..., :1] + out_sbh * share_sb2[..., 1:]
            else:
                out_sbh = out_sbh + shared_sbh * self.mixing(x_sbh).sigmoid()
        expert_context = context.experts
        if expert_context is not None:
            counts = self.expert_comm.count_rows(routing.experts_tk, self.count)
            expert_context.statistics[self.layer, expert_context.micro_batch] = (counts, routing.losses.detach())
            loss_weights = tuple(self.config.expert_losses.values())
            if any(loss_weights):
                weights = routing.losses.new_tensor(loss_weights)
                # Divide by the ranks: the gradients of the router's logits are summed over tensor-parallel ranks.
                objective = (routing.losses * weights).sum() / self.comm.size
                out_sbh = _AttachLoss.apply(out_sbh, objective, expert_context.loss_grad)
        return out_sbh, None

    def _apply_experts(self, x_sbh: Tensor, routing: Routing) -> Tensor:
        """Combined expert outputs, partial over tensor-parallel ranks unless folded."""
        chosen_tk, holes = routing.experts_tk, routing.kept_tk is not None
        if routing.kept_tk is not None:
            chosen_tk = torch.where(routing.kept_tk, chosen_tk, self.count)
        choices = Choices(chosen_tk, routing.weights_tk, holes, routing.capacity)
        x_th = x_sbh.flatten(0, 1)
        comm, local, nodes = self.expert_comm, self.local, self.expert_comm.nodes
        if nodes is None:
            return self._apply_rank_experts(x_th, choices, x_sbh.shape)
        # A token is sent to a node once, and the sum of its experts' outputs on that node comes back. Expert numbers
        # and weights are sent along with the rows.
        local_experts, k = comm.ranks.size * local, choices.chosen_tk.shape[1]
        count = partial(comm.count_by_node, experts=self.count, capacity=choices.capacity)
        # Node of each expert, and its index on that node; each with an extra entry for no expert.
        node_of = [node for node in comm.node_of for _ in range(local)]
        index_of = [rank * local + number for rank in comm.index_in_node for number in range(local)]
        node_of_e = torch.tensor([*node_of, nodes.size], device=x_th.device)
        index_of_e = torch.tensor([*index_of, 0], device=x_th.device)
        node_choices = group_choices_by_node(choices, nodes.size, node_of_e, index_of_e, count)
        counts_n2 = torch.stack([node_choices.order.counts, node_choices.counts_n], dim=1)
        received_n2 = nodes.exchange_counts(counts_n2)
        (sent, sent_p), (received, received_p) = (map(tuple, c.t().tolist()) for c in (counts_n2, received_n2))
        weights_p, numbers_p = nodes.move_choices(node_choices.weights_p, node_choices.numbers_p, sent_p, received_p)
        dispatch_leg, combine_leg = _legs(sent, received, self.layer)
        rows = nodes.move(permute(x_th, node_choices.order), dispatch_leg)
        capacity = None if choices.capacity is None else choices.capacity * nodes.size
        received_choices = decode_choices(
            numbers_p, weights_p, len(rows), min(k, local_experts), local_experts, capacity
        )
        return unpermute(
            nodes.move(self._apply_rank_experts(rows, received_choices, rows.shape), combine_leg),
            node_choices.order,
            x_sbh.shape,
        )

    def _apply_rank_experts(self, x_th: Tensor, choices: Choices, shape: Sequence[int]) -> Tensor:
        """Weighted sums of the expert outputs, dispatched directly to the ranks that hold the experts."""
        comm = self.expert_comm.ranks
        experts = comm.size * self.local
        counts = self.expert_comm.count_rows(choices.chosen_tk, experts, choices.capacity, choices.total)
        order = make_order(choices.chosen_tk, choices.holes, counts)
        rows = permute(x_th, order)
        if comm.size == 1:
            rows = self._apply_local_experts(rows, order.counts)
        else:
            counts_re = order.counts.view(comm.size, self.local)
            received_re = comm.exchange_counts(counts_re)
            sent, received = (tuple(counts.sum(1).tolist()) for counts in (counts_re, received_re))
            dispatch_leg, combine_leg = _legs(sent, received, self.layer)
            rows = comm.move(rows, dispatch_leg)
            # Received rows are sorted by source rank, then by expert; results return in this order.
            numbers = torch.arange(self.local, device=rows.device).repeat(comm.size)
            repeats = received_re.flatten().to(rows.device)
            expert_order = numbers.repeat_interleave(repeats, output_size=len(rows)).argsort(stable=True)
            source_order = torch.empty_like(expert_order)
            source_order[expert_order] = torch.arange(len(expert_order), device=rows.device)
            rows = self._apply_local_experts(rows.index_select(0, expert_order), received_re.sum(0))
            rows = comm.move(rows.index_select(0, source_order), combine_leg)
        return unpermute(rows, order, shape, choices.weights_tk)

    def _apply_local_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Outputs of rows sorted by expert. Experts without rows get zero gradients."""
        experts = cast("list[Expert]", list(self.experts.values()))
        ups, downs = [expert.up for expert in experts], [expert.down for expert in experts]
        multiply: GroupsLinear | None = batched_linear if rows.is_cuda else None
        if all(supports_grouped_products(rows, [weight for weight, _ in layers]) for layers in (ups, downs)):
            multiply = grouped_linear
        if multiply is not None:
            inner = _grouped_product(rows, ups, counts, multiply)
            return _grouped_product(experts[0].activation(inner), downs, counts, multiply)
        outputs: list[Tensor] = []
        for expert, expert_rows in zip(experts, rows.split(counts.tolist()), strict=True):
            padding = round_up_rows(expert_rows) - len(expert_rows)
            out = expert(F.pad(expert_rows, (0, 0, 0, padding)) if padding else expert_rows)
            outputs.append(out[: len(expert_rows)])
        return torch.cat(outputs)


class _AttachLoss(torch.autograd.Function):
    """Identity; its backward also starts the backward pass of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, loss_grad: Tensor) -> Tensor:
        ctx.loss_grad = loss_grad.to(loss.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.loss_grad, None
