"""Router: choice of experts for each token, with routing weights and auxiliary losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.experts import GLOBAL_LOSS, Z_LOSS
from megatron.config.model import ModelConfig
from megatron.parallel.tensor.collectives import TensorComm, enter_parallel_region
from megatron.parallel.tensor.random import DropoutKeys
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule


def _normalize_scores(scores_tn: Tensor) -> Tensor:
    # All scores may be zero if the logits underflow.
    return scores_tn / (scores_tn.sum(-1, keepdim=True) + 1e-20)


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    # The derivative of sqrt is infinite at zero: clamp, so that underflowing logits get no gradient.
    "sqrtsoftplus": lambda logits: F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt(),
}
"""Functions from logits to scores, both (t, experts), by name (``--moe-router-score-function``)."""


@dataclass(frozen=True)
class ExpertContext:
    """Training state for layers with experts.

    Args:
        micro_batch: index of the micro-batch in the step.
        loss_grad: gradient of the objective, a scalar, which also multiplies the layers' auxiliary losses.
        shares: each expert's share of the choices in the previous step, float64, by layer; empty in the first step.
        statistics: output by (layer, micro-batch): number of tokens routed to each expert, int64, and unweighted
            auxiliary losses of the layer (``ModelConfig.expert_losses``). Recomputation writes the same values again.
    """

    micro_batch: int
    loss_grad: Tensor
    shares: Mapping[int, Tensor]
    statistics: dict[tuple[int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Routing:
    """Routing of the tokens of a micro-batch, flattened from (s, b).

    Args:
        experts_tk: experts of each token, int64.
        weights_tk: weights of the experts' outputs.
        kept_tk: False for choices that are dropped because of the capacity; None if no choice is dropped.
        capacity: maximum number of tokens of an expert; None for no limit.
        losses: unweighted auxiliary losses of the layer (``ModelConfig.expert_losses``).
    """

    experts_tk: Tensor
    weights_tk: Tensor
    kept_tk: Tensor | None
    capacity: int | None
    losses: Tensor

    def slice_tokens(self, tokens: slice) -> Routing:
        """Slice the routing to some of the tokens."""
        kept_tk = None if self.kept_tk is None else self.kept_tk[tokens]
        return replace(self, experts_tk=self.experts_tk[tokens], weights_tk=self.weights_tk[tokens], kept_tk=kept_tk)


class Router(ShardedModule):
    """Top-k router with a linear layer, computed in fp32 (fp64 in fp64 runs).

    Logits are never compressed, so they are equal on all tensor-parallel ranks, which choose the same experts.

    Args:
        config: model options.
        layer: number of the layer.
        experts: number of experts in the layer.
        comm: tensor-parallel ranks.
        device, dtype: device and dtype of the parameters.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        experts: int,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.experts, self.comm = config, layer, experts, comm
        shape = (experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.specs["weight"] = ParamSpec(shape, partial_grad=comm.sequence_parallel, blocks=(experts,))
        bias = torch.zeros(experts, device=device, dtype=torch.promote_types(dtype, torch.float32))
        self.register_buffer("expert_bias", bias if config.moe_router_enable_expert_bias else None)

    def forward(
        self, x_sbh: Tensor, dropout: DropoutKeys | None = None, context: ExpertContext | None = None
    ) -> Routing:
        """Route all tokens of the micro-batch.

        Args:
            x_sbh: activations; this rank's slice of s under sequence parallelism.
            dropout: random keys of the input jitter; None in evaluation.
            context: training state; None in evaluation.
        """
        config = self.config
        wide = torch.promote_types(x_sbh.dtype, torch.float32)
        x_sbh = x_sbh.to(wide)
        eps = config.moe_input_jitter_eps
        if eps and dropout is not None:
            num_slices = self.comm.size if self.comm.sequence_parallel else 1
            keys = dropout.at((self.layer, "router"))
            noise_bsh = keys.uniform(0, (x_sbh.shape[0] * num_slices, x_sbh.shape[2]), 1.0 - eps, 1.0 + eps, x_sbh)
            noise_sbh = noise_bsh.transpose(0, 1)
            x_sbh = x_sbh * (self.comm.local_slice(noise_sbh) if num_slices > 1 else noise_sbh)
        logits_sbe = enter_parallel_region(F.linear(x_sbh, self.weight.to(wide)), self.comm, exact=True)
        logits_te = logits_sbe.flatten(0, 1)
        scores_te = _SCORES[config.moe_router_score_function](logits_te)
        ranking_te = scores_te.detach() if self.expert_bias is None else scores_te.detach() + self.expert_bias
        groups, k = config.moe_router_num_groups, config.moe_router_group_topk
        if groups is not None and k is not None and k < groups:
            # Exclude the experts outside a token's best groups: those with the largest sums of their two best scores
            # (DeepSeek-V3, 2024, section 2.1.2).
            ranking_tgm = ranking_te.unflatten(-1, (groups, -1))
            best_tg = ranking_tgm.topk(min(2, ranking_tgm.shape[-1]), dim=-1).values.sum(-1)
            excluded_tg = torch.ones_like(best_tg, dtype=torch.bool).scatter_(
                -1, best_tg.topk(k, dim=-1).indices, False
            )
            ranking_te = ranking_tgm.masked_fill(excluded_tg.unsqueeze(-1), -torch.inf).flatten(-2)
        experts_tk = ranking_te.topk(config.moe_router_topk, dim=-1).indices
        weights_tk = self._routing_weights(logits_te, scores_te, experts_tk)

        factor = config.moe_eval_capacity_factor if context is None else config.moe_expert_capacity_factor
        capacity = kept_tk = None
        if factor is not None:
            # Exact arithmetic, since 50 * 1.1 is 55.00000000000001.
            share = math.ceil(experts_tk.numel() * Fraction(str(factor)) / self.experts)
            capacity = max(config.moe_min_capacity, share)
            # Mask of the token-expert pairs within capacity.
            chosen = experts_tk.flatten()
            if config.moe_token_drop_policy == "probs":
                by_weight = weights_tk.detach().flatten().argsort(descending=True, stable=True)
                order = by_weight[chosen[by_weight].argsort(stable=True)]
            else:
                order = chosen.argsort(stable=True)
            by_expert = chosen[order]
            starts = torch.searchsorted(by_expert, torch.arange(self.experts, device=chosen.device))
            position = torch.arange(len(chosen), device=chosen.device) - starts[by_expert]
            within_capacity = torch.empty_like(chosen, dtype=torch.bool)
            within_capacity[order] = position < capacity
            kept_tk = within_capacity.view_as(experts_tk)

        last_shares_e = None if context is None else context.shares.get(self.layer)
        losses = self._auxiliary_losses(logits_te, scores_te, experts_tk, logits_sbe.shape[1], last_shares_e)
        return Routing(experts_tk, weights_tk, kept_tk, capacity, losses)

    def _routing_weights(self, logits_te: Tensor, scores_te: Tensor, experts_tk: Tensor) -> Tensor:
        config = self.config
        if config.moe_router_score_function != "softmax":
            weights_tk = scores_te.gather(1, experts_tk)
            if config.moe_router_topk > 1:
                weights_tk = _normalize_scores(weights_tk)
        elif config.moe_router_pre_softmax or config.moe_router_topk == 1:
            weights_tk = scores_te.gather(1, experts_tk)
        else:
            weights_tk = logits_te.gather(1, experts_tk).softmax(-1)
        return weights_tk * config.moe_router_topk_scaling_factor

    def _auxiliary_losses(
        self, logits_te: Tensor, scores_te: Tensor, experts_tk: Tensor, samples: int, last_shares_e: Tensor | None
    ) -> Tensor:
        """Compute the auxiliary losses, in the order of ``ModelConfig.expert_losses``.

        A load-balancing loss is E sum_e f_e P_e for E experts, with shares f of the choices and mean scores P (Switch
        Transformer, Fedus et al. 2021, section 2.2). The global-batch loss uses ``last_shares_e``, the shares of the
        last step, because the backward pass begins before all tokens of this step are routed; the first step uses the
        shares of the micro-batch. The z-loss is the mean square of the logits' log-sum-exp (ST-MoE, Zoph et al.
        2022, section 3).
        """
        config = self.config
        softmax = config.moe_router_score_function == "softmax"
        shares_te = scores_te if softmax else _normalize_scores(scores_te)
        chosen_te = torch.zeros_like(logits_te).scatter_(1, experts_tk, 1.0 / config.moe_router_topk)
        losses = []
        for kind in config.expert_losses:
            if kind == Z_LOSS:
                losses.append(logits_te.logsumexp(-1).square().mean())
            elif kind == "seq_aux_loss":
                shares_be, chosen_be = (x.view(-1, samples, self.experts).mean(0) for x in (shares_te, chosen_te))
                losses.append(self.experts * (shares_be * chosen_be).sum(-1).mean())
            else:
                chosen_e = chosen_te.mean(0)
                if kind == GLOBAL_LOSS and last_shares_e is not None:
                    chosen_e = last_shares_e.to(chosen_te)
                losses.append(self.experts * (shares_te.mean(0) * chosen_e).sum())
        return torch.stack(losses)
