"""Self-attention and cross-attention, with heads and key-value groups split over tensor-parallel ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.base.seeds import keyed_seed
from megatron.models.context import AttentionDropout, ForwardContext
from megatron.models.norm import Norm
from megatron.models.rank_context import RankContext
from megatron.models.rotary import apply_rotary
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.random import DropoutKeys, SiteKeys
from megatron.parallel.tensor.shards import ShardedModule


class Attention(ShardedModule, ABC):
    """Base class of attention layers. Subclasses define the projections and the mask.

    Args:
        rank: model options, and this rank's communication and device.
        layer: global number of the layer, for the keys of its dropout masks.
        causal: whether queries attend only to earlier positions and their own position.

    ``recompute_core``: backward recomputes the attention probabilities instead of storing them.
    """

    site = "attention"
    """Name of the layer's attention, for the keys of its dropout masks."""
    dense: RowParallelLinear

    def __init__(self, rank: RankContext, layer: int, causal: bool) -> None:
        super().__init__()
        config = rank.config
        self.layer = layer
        self.comm = rank.tensor
        self.head_dim = config.kv_channels
        self.groups = config.num_query_groups // rank.tensor.size
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.causal = causal
        self.divisor = math.sqrt(config.query_pre_attn_scalar or self.head_dim)
        self.cap = config.attn_logit_softcapping
        self.dropout = config.attention_dropout
        self.recompute_core = rank.recompute.recompute_granularity == "selective"

    def dropout_keys(self, keys: DropoutKeys) -> AttentionDropout:
        """Keys of the dropout masks of this rank's heads, or the seed of the fused CUDA kernel.

        The kernel uses a single random stream for all heads and samples. Unlike other masks, its masks therefore depend
        on the tensor-parallel size and on the micro-batch size.
        """
        if self.dropout == 0.0:
            return AttentionDropout(None, 0)
        if self.dense.weight.is_cuda and self.cap is None:
            sites = () if self.site == "attention" else (self.site,)
            seed = keyed_seed(repr((keys.seed, keys.draws, self.layer, self.comm.rank, *sites)))
            return AttentionDropout(None, seed)
        heads = self.groups * self.queries_per_group
        head_sites = ((self.layer, self.site, self.comm.rank * heads + head) for head in range(heads))
        return AttentionDropout(keys.at(*head_sites), 0)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, dropout: AttentionDropout | None
    ) -> Tensor:
        """Attend with (b, heads, s, d) queries to (b, groups, s', d) keys and values; return (s, b, heads * d)."""
        if self.recompute_core and torch.is_grad_enabled():
            inputs = (query, key, value, context.without_micro_batch(), dropout)
            out_bnsd = checkpoint(self._attend_core, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            out_bnsd = self._attend_core(query, key, value, context, dropout)
        return out_bnsd.permute(2, 0, 1, 3).flatten(2)

    def _attend_core(
        self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, dropout: AttentionDropout | None
    ) -> Tensor:
        dropping = self.dropout > 0.0 and dropout is not None
        mask = self._make_mask(query, context)
        if context.cache is not None and mask is None:
            mask = context.cache.mask(self.layer)
        causal = self.causal and mask is None
        if query.shape[2] == 1:
            causal = False  # a single query attends to all cached positions; a branch, since torch needs a plain bool
        keys = None if dropout is None else dropout.heads
        if keys is not None or self.cap is not None:
            return self._attend_unfused(query, key, value, mask, causal, keys)
        if dropping and dropout is not None:  # for the fused CUDA kernel
            torch.cuda.manual_seed(dropout.fused)
        return context.attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if dropping else 0.0,
            is_causal=causal,
            scale=1.0 / self.divisor,
            enable_gqa=self.queries_per_group > 1,
        )

    @abstractmethod
    def _make_mask(self, query: Tensor, context: ForwardContext) -> Tensor | None:
        """Make the mask of positions to attend to without a cache, (b or 1, 1, s or 1, s'); None for full attention, or
        for causal attention without other restrictions."""

    def _attend_unfused(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, keys: SiteKeys | None
    ) -> Tensor:
        """Attend without a fused kernel, with logit soft-capping and dropout masks by sample, layer and global head."""
        pairs = (query.shape[2], key.shape[2])
        # A single matrix product with the group's keys serves all queries of a group.
        rows = query.unflatten(1, (self.groups, self.queries_per_group)).flatten(2, 3)
        scores = (rows @ key.transpose(-1, -2)).view(*query.shape[:2], *pairs).div(self.divisor)
        if self.cap is not None:
            scores = scores.div(self.cap).tanh().mul(self.cap)
        if causal:
            mask = torch.ones(pairs, dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        probs = scores.softmax(dim=-1)
        if keys is not None:
            masks = [keys.keep_mask(head, pairs, self.dropout, probs) for head in range(query.shape[1])]
            probs = probs * torch.stack(masks, dim=1)
        return (probs.view(*rows.shape[:3], pairs[1]) @ value).view(*query.shape[:3], -1)


class SelfAttention(Attention):
    """Self-attention: (s, b, h) -> (s, b, h), and the output bias, which the caller adds.

    The rows of the fused projection are ordered [group, (queries of the group, key, value), head channel]. A slice by
    groups is therefore contiguous, and the order does not depend on the number of ranks.
    """

    def __init__(self, rank: RankContext, layer: int, causal: bool) -> None:
        super().__init__(rank, layer, causal)
        config = rank.config
        self.window = config.window_of(layer)
        rows = config.num_query_groups * (self.queries_per_group + 2) * self.head_dim
        width = config.num_attention_heads * self.head_dim
        biased = config.add_bias_linear or config.add_qkv_bias
        blocks = tuple(count * self.head_dim for count in (self.queries_per_group, 1, 1))
        self.query_key_value = ColumnParallelLinear(
            (rows, config.hidden_size), biased, rank.tensor, rank.device, rank.dtype, blocks=blocks
        )
        self.q_layernorm: Norm | None = None
        self.k_layernorm: Norm | None = None
        if config.qk_layernorm:
            self.q_layernorm = Norm(rank, self.head_dim, of_heads=True)
            self.k_layernorm = Norm(rank, self.head_dim, of_heads=True)
        self.dense = RowParallelLinear(
            width, config.hidden_size, config.add_bias_linear, rank.tensor, rank.device, rank.dtype
        )

    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor | None]:
        mixed = self.query_key_value(x_sbh)
        s, b, _ = mixed.shape
        mixed = mixed.view(s, b, self.groups, self.queries_per_group + 2, self.head_dim)
        query, key, value = mixed.split((self.queries_per_group, 1, 1), dim=3)
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if context.cache is not None:
            key, value = context.cache.extend(self.layer, key, value)
        result: tuple[Tensor, Tensor | None] = self.dense(self._attend(query, key, value, context, dropout))
        return result

    def _make_mask(self, query: Tensor, context: ForwardContext) -> Tensor | None:
        allowed: Tensor | None = None
        s, ids_bs = query.shape[2], context.segment_ids_bs
        if ids_bs is not None:
            same = ids_bs.unsqueeze(2) == ids_bs.unsqueeze(1)
            allowed = (same.tril() if self.causal else same).unsqueeze(1)
        if self.window is not None and s > self.window:
            band = torch.ones((1, 1, s, s), dtype=torch.bool, device=query.device).tril().triu(1 - self.window)
            allowed = band if allowed is None else allowed & band
        return allowed


class CrossAttention(Attention):
    """Cross-attention of a decoder to the encoder output: (s, b, h) -> (s, b, h), and the output bias, which the caller
    adds.

    The rows of the fused key-value projection are ordered [group, (key, value), head channel].
    """

    site = "cross-attention"

    def __init__(self, rank: RankContext, layer: int) -> None:
        super().__init__(rank, layer, causal=False)
        config = rank.config
        width = config.num_attention_heads * self.head_dim
        rows, hidden = config.num_query_groups * 2 * self.head_dim, config.hidden_size
        biased = config.add_bias_linear or config.add_qkv_bias
        self.query = ColumnParallelLinear((width, hidden), biased, rank.tensor, rank.device, rank.dtype)
        blocks = (self.head_dim, self.head_dim)
        self.key_value = ColumnParallelLinear(
            (rows, hidden), biased, rank.tensor, rank.device, rank.dtype, entered=True, blocks=blocks
        )
        self.dense = RowParallelLinear(width, hidden, config.add_bias_linear, rank.tensor, rank.device, rank.dtype)

    def forward(
        self, x_sbh: Tensor, context: ForwardContext, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor | None]:
        assert context.memory is not None
        query, mixed = self.query(x_sbh), self.key_value(context.memory.entered_sbh)
        query = query.unflatten(2, (-1, self.head_dim))
        key, value = mixed.unflatten(2, (self.groups, 2, self.head_dim)).unbind(dim=3)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        result: tuple[Tensor, Tensor | None] = self.dense(self._attend(query, key, value, context, dropout))
        return result

    def _make_mask(self, query: Tensor, context: ForwardContext) -> Tensor | None:
        assert context.memory is not None
        ids_bs = context.memory.segment_ids_bs
        # Padding queries attend to the text, too, because a fully masked row would give NaN.
        return None if ids_bs is None else (ids_bs == 0)[:, None, None]
