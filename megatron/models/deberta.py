"""DeBERTa-v2 and -v3: post-norm layers with disentangled attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.block import Layer, hidden_dropout
from megatron.models.classification import ClassifierStage
from megatron.models.context import ForwardContext, LayerDropout
from megatron.models.disentangled import DisentangledAttention, RelativePositions, relative_rows
from megatron.models.embedding import Embedding
from megatron.models.mlp import MLP
from megatron.models.norm import Norm
from megatron.models.rank_context import RankContext
from megatron.models.stage import StagePart
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.random import SiteKeys
from megatron.parallel.tensor.shards import ShardedModule


def mask_padding(x_sbh: Tensor, context: ForwardContext, comm: TensorComm) -> Tensor:
    """Set padding positions of activations to zero."""
    if context.segment_ids_bs is None:
        return x_sbh
    padded_sb = (context.segment_ids_bs != 0).t()
    padded_sb = comm.local_slice(padded_sb) if comm.sequence_parallel else padded_sb
    return x_sbh.masked_fill(padded_sb.unsqueeze(-1), 0.0)


class NormedEmbedding(Embedding):
    """Embeddings that are normalized and masked before dropout."""

    def __init__(self, rank: RankContext, shard: VocabShard, copy: bool = False) -> None:
        super().__init__(rank, shard, copy)
        self.layernorm = Norm(rank)

    def _sum_embeddings(self, tokens_bs: Tensor, context: ForwardContext, site: str) -> Tensor:
        return mask_padding(self.layernorm(super()._sum_embeddings(tokens_bs, context, site)), context, self.comm)


class Convolution(ShardedModule):
    """Convolution along the sequence, parallel to the first layer and added to its output.

    It is replicated on tensor-parallel ranks.
    """

    def __init__(self, rank: RankContext) -> None:
        super().__init__()
        config = rank.config
        self.comm = rank.tensor
        self.dropout = config.hidden_dropout
        shape = (config.hidden_size, config.hidden_size, config.conv_kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=rank.device, dtype=rank.dtype))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size, device=rank.device, dtype=rank.dtype))
        self.layernorm = Norm(rank)

    def forward(self, x_sbh: Tensor, out_sbh: Tensor, context: ForwardContext, keys: SiteKeys | None) -> Tensor:
        """Normalized sum of the first layer's output ``out_sbh`` and the convolution of its input ``x_sbh``."""
        convolved_bhs = F.conv1d(x_sbh.permute(1, 2, 0), self.weight, self.bias, padding=self.weight.shape[2] // 2)
        branch_sbh = mask_padding(convolved_bhs.permute(2, 0, 1), context, self.comm)
        branch_sbh = F.gelu(hidden_dropout(branch_sbh, self.dropout, keys, len(DebertaLayer.sites) - 1, self.comm))
        return mask_padding(self.layernorm(out_sbh + branch_sbh), context, self.comm)


class DebertaLayer(Layer):
    """Post-norm layer: attention and MLP, each followed by dropout, residual and norm."""

    sites = (*Layer.sites, "convolution")

    def __init__(self, rank: RankContext, layer: int) -> None:
        super().__init__(rank, layer)
        self.self_attention = DisentangledAttention(rank.at(f"{layer}.self_attention"), layer, causal=False)
        self.post_attention_layernorm = Norm(rank)
        self.mlp = MLP(rank.at(f"{layer}.mlp"))
        self.output_layernorm = Norm(rank)
        self.convolution: Convolution | None = None
        if layer == 0 and rank.config.conv_kernel_size:
            self.convolution = Convolution(rank)

    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        positions: tuple[Tensor, Tensor] | None,
        dropout: LayerDropout | None,
    ) -> Tensor:
        keys = None if dropout is None else dropout.attention
        branch = self.self_attention(x_sbh, context, positions, keys)
        residual_sbh = self.post_attention_layernorm(self._add_residual(branch, x_sbh, dropout, 0))
        out_sbh: Tensor = self.output_layernorm(self._add_residual(self.mlp(residual_sbh), residual_sbh, dropout, 1))
        if self.convolution is None:
            return out_sbh
        result: Tensor = self.convolution(x_sbh, out_sbh, context, None if dropout is None else dropout.hidden)
        return result


class DebertaStage(ClassifierStage):
    """A stage of DeBERTa, which only supports sequence-level fine-tuning; without a task, only its body."""

    embedding_type = NormedEmbedding
    ends_with_norm = False

    def __init__(self, rank: RankContext, stage_part: StagePart, shard: VocabShard) -> None:
        super().__init__(rank, stage_part, shard)
        self.relative_positions = RelativePositions(rank, stage_part.first)

    def _make_layer(self, rank: RankContext, number: int) -> Layer:
        return DebertaLayer(rank, number)

    def _position_tables(self, x_sbh: Tensor, context: ForwardContext) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Relative-position table, and its row for each pair of tokens; the same for all layers."""
        length = x_sbh.shape[0] * (self.comm.size if self.comm.sequence_parallel else 1)
        distances = self.relative_positions(), relative_rows(length, self.config, x_sbh.device)
        return dict.fromkeys(self.stage_part.layers, distances)
