"""Self-attention, causal or in both directions, with heads (and key-value groups) split over tensor-parallel ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.comm.tensor import TensorComm
from megatron.config.model import ModelConfig
from megatron.model.context import ForwardContext, LayerDropout
from megatron.model.rotary import apply_rotary
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.random import DropoutKeys, SiteKeys, keyed_seed
from megatron.parallel.tensor.shards import ShardedModule


class SelfAttention(ShardedModule):
    """Self-attention: (s, b, h) -> (s, b, h), and the bias still to be added.

    The rows of the fused projection are ordered [group, (queries of the group, key, value), head channel], so a
    slice by groups is contiguous and does not depend on the number of ranks.

    Args:
        config: the model.
        layer: global number of the layer, which keys its dropout masks.
        recompute_core: keep no attention probabilities for backward, but compute them again.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.comm = comm
        self.head_dim = config.kv_channels
        self.groups = config.num_query_groups // comm.size
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        self.window = config.sliding_window
        self.causal = config.causal
        self.dropout = config.attention_dropout
        self.recompute_core = recompute_core
        rows = config.num_query_groups * (self.queries_per_group + 2) * self.head_dim
        width = config.num_attention_heads * self.head_dim
        biased = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = ColumnParallelLinear((rows, config.hidden_size), biased, comm, device, dtype)
        self.dense = RowParallelLinear(width, config.hidden_size, config.add_bias_linear, comm, device, dtype)

    def dropout_keys(self, keys: DropoutKeys) -> tuple[SiteKeys | None, int]:
        """Keys of this rank's heads where their masks are drawn here, and the seed of the fused CUDA kernel.

        That kernel draws one stream for all its heads and samples, so its masks (alone) depend on the tensor-parallel
        size and the micro-batch size.
        """
        if self.dropout == 0.0:
            return None, 0
        if self.dense.weight.is_cuda:
            return None, keyed_seed(repr((keys.seed, keys.draws, self.layer, self.comm.rank)))
        heads = self.groups * self.queries_per_group
        return keys.at(*((self.layer, "attention", self.comm.rank * heads + head) for head in range(heads))), 0

    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: LayerDropout | None,
    ) -> tuple[Tensor, Tensor | None]:
        mixed = self.query_key_value(x_sbh)
        s, b, _ = mixed.shape
        mixed = mixed.view(s, b, self.groups, self.queries_per_group + 2, self.head_dim)
        query, key, value = mixed.split((self.queries_per_group, 1, 1), dim=3)
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if context.cache is not None:
            key, value = context.cache.extend(self.layer, key, value)
        if self.recompute_core and torch.is_grad_enabled():
            given = (query, key, value, context, dropout)
            out_bnsd = checkpoint(self._core, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            out_bnsd = self._core(query, key, value, context, dropout)
        return self.dense(out_bnsd.permute(2, 0, 1, 3).reshape(s, b, -1))

    def _core(
        self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, dropout: LayerDropout | None
    ) -> Tensor:
        """Attention of (b, heads, s, d) queries over (b, groups, s, d) keys and values."""
        dropping = self.dropout > 0.0 and dropout is not None
        if dropout is not None and dropout.attention is not None:
            return self._core_with_keyed_dropout(query, key, value, context, dropout.attention)
        if dropping and dropout is not None:  # for the fused CUDA kernel
            torch.cuda.manual_seed(dropout.fused)
        mask = self._allowed(query, context)
        if context.cache is not None and mask is None:
            mask = context.cache.mask
        causal = self.causal and mask is None
        if (
            query.shape[2] == 1
        ):  # one position alone comes after all that are kept; a branch, as torch wants a plain bool
            causal = False
        return context.attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if dropping else 0.0,
            is_causal=causal,
            enable_gqa=self.queries_per_group > 1,
        )

    def _allowed(self, query: Tensor, context: ForwardContext) -> Tensor | None:
        """Mask of allowed positions for a whole text, (b or 1, 1, s, s); None where all are, or all earlier ones."""
        allowed = None if context.segment_ids_bs is None else _within_segments(context.segment_ids_bs, self.causal)
        s = query.shape[2]
        if self.window is not None and s > self.window:
            band = torch.ones((1, 1, s, s), dtype=torch.bool, device=query.device).tril().triu(1 - self.window)
            allowed = band if allowed is None else allowed & band
        return allowed

    def _core_with_keyed_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, keys: SiteKeys
    ) -> Tensor:
        """Attention written out, with a mask keyed by sample, layer and global head."""
        key = key.repeat_interleave(self.queries_per_group, dim=1)
        value = value.repeat_interleave(self.queries_per_group, dim=1)
        s = query.shape[2]
        scores = query @ key.transpose(-1, -2)
        allowed = self._allowed(query, context)
        if allowed is None:
            allowed = torch.ones((s, s), dtype=torch.bool, device=query.device)
            allowed = allowed.tril() if self.causal else allowed
        probs = scores.div(math.sqrt(self.head_dim)).masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        masks = [keys.keep_mask(head, (s, s), self.dropout, probs) for head in range(query.shape[1])]
        result: Tensor = (probs * torch.stack(masks, dim=1)) @ value
        return result


def _within_segments(segment_ids_bs: Tensor, causal: bool) -> Tensor:
    """Mask within segments: position i may attend to j (if ``causal``, j <= i) of equal number; (b, 1, s, s)."""
    same = segment_ids_bs.unsqueeze(2) == segment_ids_bs.unsqueeze(1)
    return (same.tril() if causal else same).unsqueeze(1)
