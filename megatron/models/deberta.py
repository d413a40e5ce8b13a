"""DeBERTa-v2 and -v3: post-norm layers with disentangled attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.models.block import Layer, hidden_dropout
from megatron.models.classification import ClassifierStage
from megatron.models.context import ForwardContext, LayerDropout
from megatron.models.disentangled import DisentangledAttention, RelativePositions, relative_rows
from megatron.models.embedding import Embedding
from megatron.models.mlp import MLP
from megatron.models.norm import Norm
from megatron.models.stage import StagePart
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.random import SiteKeys
from megatron.parallel.tensor.shards import ShardedModule


def without_padding(x_sbh: Tensor, context: ForwardContext, comm: TensorComm) -> Tensor:
    """Activations with padding positions set to zero."""
    if context.segment_ids_bs is None:
        return x_sbh
    padded_sb = (context.segment_ids_bs != 0).t()
    padded_sb = comm.own_part(padded_sb) if comm.sequence_parallel else padded_sb
    return x_sbh.masked_fill(padded_sb.unsqueeze(-1), 0.0)


class NormedEmbedding(Embedding):
    """Embeddings that are normalized and masked before dropout."""

    def __init__(
        self,
        config: ModelConfig,
        shard: VocabShard,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
        copy: bool = False,
    ) -> None:
        super().__init__(config, shard, comm, device, dtype, copy)
        self.layernorm = Norm(config, comm, device, dtype)

    def _summed(self, tokens_bs: Tensor, context: ForwardContext, site: str) -> Tensor:
        return without_padding(self.layernorm(super()._summed(tokens_bs, context, site)), context, self.comm)


class Convolution(ShardedModule):
    """Convolution along the sequence, parallel to the first layer and added to its output.

    It is replicated on tensor-parallel ranks.
    """

    def __init__(self, config: ModelConfig, comm: TensorComm, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.comm = comm
        self.dropout = config.hidden_dropout
        shape = (config.hidden_size, config.hidden_size, config.conv_kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size, device=device, dtype=dtype))
        self.layernorm = Norm(config, comm, device, dtype)

    def forward(self, x_sbh: Tensor, out_sbh: Tensor, context: ForwardContext, keys: SiteKeys | None) -> Tensor:
        """Normalized sum of the first layer's output ``out_sbh`` and the convolution of its input ``x_sbh``."""
        convolved_bhs = F.conv1d(x_sbh.permute(1, 2, 0), self.weight, self.bias, padding=self.weight.shape[2] // 2)
        beside_sbh = without_padding(convolved_bhs.permute(2, 0, 1), context, self.comm)
        beside_sbh = F.gelu(hidden_dropout(beside_sbh, self.dropout, keys, len(DebertaLayer.sites) - 1, self.comm))
        return without_padding(self.layernorm(out_sbh + beside_sbh), context, self.comm)


class DebertaLayer(Layer):
    """Post-norm layer: attention and MLP, each followed by dropout, residual and norm."""

    sites = (*Layer.sites, "convolution")

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
        recompute_core: bool,
    ) -> None:
        super().__init__(config, layer, comm)
        self.self_attention = DisentangledAttention(
            config, layer, comm.at(f"{layer}.self_attention"), device, dtype, False, recompute_core
        )
        self.post_attention_layernorm = Norm(config, comm, device, dtype)
        self.mlp = MLP(config, comm.at(f"{layer}.mlp"), device, dtype)
        self.output_layernorm = Norm(config, comm, device, dtype)
        self.convolution: Convolution | None = None
        if layer == 0 and config.conv_kernel_size:
            self.convolution = Convolution(config, comm, device, dtype)

    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        positions: tuple[Tensor, Tensor] | None,
        dropout: LayerDropout | None,
    ) -> Tensor:
        keys = None if dropout is None else dropout.attention
        attended = self.self_attention(x_sbh, context, positions, keys)
        residual_sbh = self.post_attention_layernorm(self._add(attended, x_sbh, dropout, 0))
        out_sbh: Tensor = self.output_layernorm(self._add(self.mlp(residual_sbh), residual_sbh, dropout, 1))
        if self.convolution is None:
            return out_sbh
        result: Tensor = self.convolution(x_sbh, out_sbh, context, None if dropout is None else dropout.hidden)
        return result


class DebertaStage(ClassifierStage):
    """A stage of DeBERTa, which only supports sequence-level fine-tuning; without a task, only its body."""

    embedding_type = NormedEmbedding
    ends_with_norm = False

    def __init__(
        self,
        config: ModelConfig,
        part: StagePart,
        shard: VocabShard,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
        recompute: RecomputeConfig,
    ) -> None:
        super().__init__(config, part, shard, comm, device, dtype, recompute)
        self.relative_positions = RelativePositions(config, part.first, comm, device, dtype)

    def _make_layer(self, number: int, device: torch.device) -> Layer:
        recompute_core = self.recompute.recompute_granularity == "selective"
        return DebertaLayer(self.config, number, self.comm, device, self.dtype, recompute_core)

    def _positions(self, x_sbh: Tensor, context: ForwardContext) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Relative-position table, and its row for each pair of tokens; the same for all layers."""
        length = x_sbh.shape[0] * (self.comm.size if self.comm.sequence_parallel else 1)
        distances = self.relative_positions(), relative_rows(length, self.config, x_sbh.device)
        return dict.fromkeys(self.part.layers, distances)

    def final_states(self, x_sbh: Tensor) -> Tensor:
        return x_sbh
