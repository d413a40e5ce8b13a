"""Disentangled attention, with separate content and relative position (DeBERTa, He et al. 2021)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.model import ModelConfig
from megatron.distributed.layout import Tie
from megatron.models.attention import SelfAttention
from megatron.models.context import AttentionDropout, ForwardContext
from megatron.models.norm import Norm
from megatron.models.rank_context import RankContext
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule

_TERMS = 3
"""Terms of a score: content to content, content to position, position to content."""


def relative_rows(length: int, config: ModelConfig, device: torch.device) -> Tensor:
    """Row of the relative-position table for each pair of a query and a key, (s, s).

    Short distances have separate rows; with buckets, long distances share rows on a logarithmic scale.
    """
    positions = torch.arange(length, device=device)
    distance_ss = positions.unsqueeze(1) - positions.unsqueeze(0)
    if config.position_buckets:
        near = config.position_buckets // 2
        # fp32 and this order of operations match the reference implementation: the last bit can change a bucket.
        scale = torch.log(torch.tensor(((config.max_relative_positions or 0) - 1) / near, device=device))
        share_ss = torch.log(distance_ss.abs().clamp(min=near) / near) / scale
        far_ss = (torch.ceil(share_ss * (near - 1)) + near).long() * distance_ss.sign()
        distance_ss = torch.where(distance_ss.abs() <= near, distance_ss, far_ss)
    span = config.relative_span
    return (distance_ss + span).clamp(0, 2 * span - 1)


class RelativePositions(ShardedModule):
    """Normalized relative-position table: () -> (2 span, h). All stages hold a tied copy.

    Args:
        rank: the rank's model, communication and device. Each rank computes the gradient of its heads.
        first: whether this is the first stage.
    """

    def __init__(self, rank: RankContext, first: bool) -> None:
        super().__init__()
        config = rank.config
        shape = (2 * config.relative_span, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=rank.device, dtype=rank.dtype))
        self.layernorm = Norm(rank)
        for module in (self, self.layernorm):
            for name, param in module.named_parameters(recurse=False):
                module.specs[name] = ParamSpec(
                    tuple(param.shape), partial_grad=rank.tensor.size > 1, tied_copy=not first, tied=Tie.DISTANCES
                )

    def forward(self) -> Tensor:
        result: Tensor = self.layernorm(self.weight)
        return result


class DisentangledAttention(SelfAttention):
    """Bidirectional self-attention; scores are the sum of content-content, content-position and position-content terms.

    Relative positions are projected with the same weights as tokens.
    """

    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Like ``SelfAttention``, with the relative-position table (2 span, h) and the row of each pair (s, s) in place
        of rotary tables."""
        assert rotary is not None
        table_rh, rows_ss = rotary
        linear, heads = self.query_key_value, self.groups
        mixed = linear(x_sbh)
        s, b, _ = mixed.shape
        query, key, value = mixed.view(s, b, heads, 3, self.head_dim).permute(3, 1, 2, 0, 4)
        weight = linear.weight.view(heads, 3, self.head_dim, -1)[:, :2].flatten(0, 2)
        bias = None if linear.bias is None else linear.bias.view(heads, 3, self.head_dim)[:, :2].flatten()
        position_query_key = F.linear(table_rh, weight, bias).view(len(table_rh), heads, 2, self.head_dim)
        position_query, position_key = position_query_key.permute(2, 1, 0, 3)
        inputs = (query, key, value, position_query, position_key, rows_ss, context.without_micro_batch(), dropout)
        if self.recompute_core and torch.is_grad_enabled():
            out_bnsd = checkpoint(self._disentangled, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            out_bnsd = self._disentangled(*inputs)
        result: tuple[Tensor, Tensor | None] = self.dense(out_bnsd.permute(2, 0, 1, 3).flatten(2))
        return result

    def _disentangled(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position_query: Tensor,
        position_key: Tensor,
        rows_ss: Tensor,
        context: ForwardContext,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """Attention of queries, keys and values (b, heads, s, d), with relative positions (heads, 2 span, d)."""
        scale = 1.0 / math.sqrt(_TERMS * self.head_dim)
        query, position_query = query * scale, position_query * scale
        shape = (*query.shape[:3], query.shape[2])
        to_position = (query @ position_key.transpose(-1, -2)).gather(-1, rows_ss.expand(shape))
        from_position = (key @ position_query.transpose(-1, -2)).gather(-1, rows_ss.t().expand(shape))
        scores = query @ key.transpose(-1, -2) + to_position + from_position.transpose(-1, -2)
        allowed = self._make_mask(query, context)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        probs = scores.softmax(dim=-1)
        if self.dropout != 0.0 and dropout is not None:
            if dropout.heads is None:
                torch.cuda.manual_seed(dropout.fused)
                probs = F.dropout(probs, self.dropout)
            else:
                keys, pairs = dropout.heads, tuple(probs.shape[2:])
                masks = [keys.keep_mask(head, pairs, self.dropout, probs) for head in range(probs.shape[1])]
                probs = probs * torch.stack(masks, dim=1)
        return probs @ value
