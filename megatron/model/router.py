"""Routing: which experts each token goes to, with which weights, and the losses that balance experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.comm.tensor import TensorComm, enter_parallel_region
from megatron.config.model import ModelConfig
from megatron.model.context import ForwardContext
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule, with_partial_grad


@dataclass(frozen=True)
class Routing:
    """The experts of each token, for the tokens of a micro-batch, flattened from (s, b).

    Args:
        experts_tk: int64 numbers of a token's experts.
        weights_tk: weights of their outputs.
        kept_tk: whether the expert takes the token; None where all do.
        losses: the layer's losses, without their weights in the objective (``EXPERT_LOSSES``).
    """

    experts_tk: Tensor
    weights_tk: Tensor
    kept_tk: Tensor | None
    losses: Tensor

    def of_tokens(self, tokens: slice) -> Routing:
        """The routing of some of the tokens."""
        kept_tk = None if self.kept_tk is None else self.kept_tk[tokens]
        return Routing(self.experts_tk[tokens], self.weights_tk[tokens], kept_tk, self.losses)

    def counts(self, experts: int) -> Tensor:
        """Number of tokens that chose each expert, int64."""
        return torch.bincount(self.experts_tk.flatten(), minlength=experts)


class Router(ShardedModule):
    """Chooses experts by a linear layer, in fp32 (fp64 in fp64 runs).

    Its logits are exact and equal on all tensor-parallel ranks: all choose alike, whatever is compressed.

    Args:
        config: the model.
        layer: number of the layer.
        experts: number of its experts.
        comm: the tensor-parallel ranks.
        device, dtype: those of the parameters.
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
        spec = ParamSpec((experts, config.hidden_size))
        self.weight = nn.Parameter(torch.empty(spec.logical_shape, device=device, dtype=dtype))
        self.specs["weight"] = with_partial_grad(spec) if comm.sequence_parallel else spec
        biased = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(experts, device=device) if biased else None)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Routing:
        """The routing of all tokens of the micro-batch, from this rank's part of them under sequence parallelism."""
        wide = torch.promote_types(x_sbh.dtype, torch.float32)
        local = F.linear(self._jittered(x_sbh.to(wide), context), self.weight.to(wide))
        logits_sbe = enter_parallel_region(local, self.comm, exact=True)
        logits_te = logits_sbe.flatten(0, 1)
        scores_te = logits_te.softmax(-1) if self.config.moe_router_score_function == "softmax" else logits_te.sigmoid()
        ranking = scores_te if self.expert_bias is None else scores_te + self.expert_bias
        experts_tk = ranking.detach().topk(self.config.moe_router_topk, dim=-1).indices
        weights_tk = self._weights(logits_te, scores_te, experts_tk)
        kept_tk = self._kept(experts_tk, weights_tk.detach(), context.experts is not None)
        losses = self._losses(logits_te, scores_te, experts_tk, logits_sbe.shape[1])
        return Routing(experts_tk, weights_tk, kept_tk, losses)

    def _jittered(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        eps = self.config.moe_input_jitter_eps
        if not eps or context.dropout is None:
            return x_sbh
        parts = self.comm.size if self.comm.sequence_parallel else 1
        keys = context.dropout.at((self.layer, "router"))
        noise_bsh = keys.uniform(0, (x_sbh.shape[0] * parts, x_sbh.shape[2]), 1.0 - eps, 1.0 + eps, x_sbh)
        noise_sbh = noise_bsh.transpose(0, 1)
        return x_sbh * (self.comm.own_part(noise_sbh) if parts > 1 else noise_sbh)

    def _weights(self, logits_te: Tensor, scores_te: Tensor, experts_tk: Tensor) -> Tensor:
        config = self.config
        if config.moe_router_score_function == "sigmoid":
            weights_tk = scores_te.gather(1, experts_tk)
            if config.moe_router_topk > 1:
                weights_tk = weights_tk / (weights_tk.sum(-1, keepdim=True) + 1e-20)
        elif config.moe_router_pre_softmax or config.moe_router_topk == 1:
            weights_tk = scores_te.gather(1, experts_tk)
        else:
            weights_tk = logits_te.gather(1, experts_tk).softmax(-1)
        return weights_tk * config.moe_router_topk_scaling_factor

    def _kept(self, experts_tk: Tensor, weights_tk: Tensor, training: bool) -> Tensor | None:
        """Which of the tokens their experts take, by the capacity for a micro-batch."""
        config = self.config
        factor = config.moe_expert_capacity_factor if training else config.moe_eval_capacity_factor
        if factor is None:
            return None
        capacity = max(config.moe_min_capacity, math.ceil(experts_tk.numel() / self.experts * factor))
        chosen = experts_tk.flatten()
        by_weight = config.moe_token_drop_policy == "probs"
        first = weights_tk.flatten().argsort(descending=True, stable=True) if by_weight else None
        order = chosen.argsort(stable=True) if first is None else first[chosen[first].argsort(stable=True)]
        counts = torch.bincount(chosen, minlength=self.experts)
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(chosen), device=chosen.device) - starts[chosen[order]]
        kept = torch.empty_like(chosen, dtype=torch.bool)
        kept[order] = place < capacity
        return kept.view_as(experts_tk)

    def _losses(self, logits_te: Tensor, scores_te: Tensor, experts_tk: Tensor, samples: int) -> Tensor:
        """The losses of ``EXPERT_LOSSES``: E sum_e f_e P_e for the shares f of the tokens and the mean scores P (Switch
        Transformer, Fedus et al. 2021, section 2.2), and the mean square of the logits' log-sum-exp (ST-MoE, Zoph et
        al. 2022, section 3)."""
        config = self.config
        shares_te = (
            scores_te / scores_te.sum(-1, keepdim=True)
            if config.moe_router_score_function == "sigmoid"
            else (scores_te)
        )
        chosen_te = torch.zeros_like(logits_te).scatter_(1, experts_tk, 1.0 / config.moe_router_topk)
        if config.moe_router_load_balancing_type == "seq_aux_loss":
            shares_sbe, chosen_sbe = (x.view(-1, samples, self.experts) for x in (shares_te, chosen_te))
            balance = self.experts * (shares_sbe.mean(0) * chosen_sbe.mean(0)).sum(-1).mean()
        else:
            balance = self.experts * (shares_te.mean(0) * chosen_te.mean(0)).sum()
        return torch.stack([balance, logits_te.logsumexp(-1).square().mean()])
