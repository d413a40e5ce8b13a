"""GPT: embedding, layers, final norm and loss; any contiguous part of it is a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.comm.tensor import TensorComm
from megatron.compression.points import Point
from megatron.config.model import ModelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.model.block import TransformerLayer, hidden_dropout
from megatron.model.context import ForwardContext
from megatron.model.norm import Norm
from megatron.model.rotary import rotary_tables
from megatron.parallel.tensor.cross_entropy import head_loss
from megatron.parallel.tensor.embedding import VocabParallelEmbedding, VocabShard, rows_of
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.products import Recipe
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule, with_partial_grad

TIED_NAME = "embedding.word_embeddings.weight"
"""Logical name of the tied embedding, on whichever stage it is."""


@dataclass(frozen=True)
class StagePart:
    """The part of the model that one chunk holds.

    Args:
        layers: global numbers of its layers.
        first: holds the embedding.
        last: holds the final norm and the loss.
    """

    layers: range
    first: bool = True
    last: bool = True


class Embedding(ShardedModule):
    """Token and learned position embeddings with dropout: tokens (b, s) -> (s, b, h), or the own part of s."""

    def __init__(
        self,
        config: ModelConfig,
        shard: VocabShard,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.dropout = config.hidden_dropout
        self.residual_dtype = config.residual_dtype(dtype)
        tied = not config.untie_embeddings_and_output_weights
        self.word_embeddings = VocabParallelEmbedding(shard, config.hidden_size, tied, comm, device, dtype)
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(config, comm, device, dtype)

    def forward(self, tokens_bs: Tensor, context: ForwardContext) -> Tensor:
        x_sbh = self.word_embeddings(tokens_bs)
        if self.position_embeddings is not None:
            x_sbh = x_sbh + self.position_embeddings(tokens_bs, context)
        x_sbh = x_sbh.to(self.residual_dtype)
        keys = None if context.dropout is None else context.dropout.at(("embedding",))
        return hidden_dropout(x_sbh, self.dropout, keys, 0, self.comm)


class PositionEmbedding(ShardedModule):
    """A learned vector per position."""

    def __init__(self, config: ModelConfig, comm: TensorComm, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.comm = comm
        shape = (config.max_position_embeddings, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        spec = ParamSpec(shape)
        self.specs["weight"] = with_partial_grad(spec) if comm.sequence_parallel else spec

    def forward(self, tokens_bs: Tensor, context: ForwardContext) -> Tensor:
        """Vectors (s, 1 or b, h) of the positions."""
        if context.position_ids_bs is None:
            positions_sb = torch.arange(tokens_bs.shape[1], device=tokens_bs.device).unsqueeze(1)
        else:
            positions_sb = context.position_ids_bs.t()
        if self.comm.sequence_parallel:
            positions_sb = self.comm.own_part(positions_sb)
        return rows_of(self.weight, positions_sb)


class OutputWeight(ShardedModule):
    """The output projection: its own parameter, or the last stage's copy of the tied embedding."""

    def __init__(
        self,
        config: ModelConfig,
        shard: VocabShard,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        tied = not config.untie_embeddings_and_output_weights
        self.weight = shard.weight(config.hidden_size, device, dtype)
        self.specs["weight"] = shard.spec(config.hidden_size, tied=tied, tied_copy=tied)
        if tied:
            self.logical_names["weight"] = TIED_NAME


class GPTStage(nn.Module):
    """The layers of one chunk, with the embedding before them and the loss after them where they belong.

    Args:
        config: the model.
        part: this chunk's part of the model. ``StagePart(range(num_layers))`` is the whole model.
        shard: rows of the vocabulary on this rank.
        recompute: activations that backward recomputes instead of keeping them.
    """

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
        super().__init__()
        self.config = config
        self.part = part
        self.shard = shard
        self.comm = comm
        self.dtype = dtype
        self.recompute = recompute
        tied = not config.untie_embeddings_and_output_weights
        if part.first:
            self.embedding = Embedding(config, shard, comm, device, dtype)
        recompute_core = recompute.recompute_granularity == "selective"
        self.layers = nn.ModuleDict(
            {str(n): TransformerLayer(config, n, comm, device, dtype, recompute_core) for n in part.layers}
        )
        if part.last:
            self.final_layernorm = Norm(config, comm, device, dtype)
            if not (tied and part.first):
                self.output_layer = OutputWeight(config, shard, device, dtype)

    @property
    def output_weight(self) -> Tensor:
        """Local rows of the output projection, (rows, h)."""
        return self.output_layer.weight if hasattr(self, "output_layer") else self.embedding.word_embeddings.weight

    def _layers(self) -> list[TransformerLayer]:
        return cast("list[TransformerLayer]", list(self.layers.values()))

    def compile_layers(self, backend: str = "inductor", lengths_vary: bool = False) -> None:
        """Compiles the layers by torch, all to the same code: one for training and one for evaluation.

        Args:
            backend: torch's name of the compiler's backend.
            lengths_vary: sequences of other lengths will come; the second one then gets code for any length.
        """
        for layer in self._layers():
            layer.compile(dynamic=None if lengths_vary else False, backend=backend)

    def compute_in_fp8(self, recipe: Recipe | None) -> None:
        """Computes the layers' linear parts from 8-bit numbers from now on (None: in the parameters' type).

        The embedding and the output layer stay as they are.
        """
        for module in self.layers.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.compute_in_fp8(recipe)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Tokens (b, s) on the first stage, else activations (s, b, h), to activations (s, b, h)."""
        x_sbh = self.embedding(x, context) if self.part.first else x
        rotary = self._rotary(x_sbh, context)
        layers = self._layers()
        full = self.recompute.recompute_granularity == "full" and torch.is_grad_enabled()
        if not full:
            return self._run(layers, x_sbh, context, rotary)
        count = self.recompute.recompute_num_layers
        if self.recompute.recompute_method == "block":
            groups = [[layer] for layer in layers[:count]]
            rest = layers[count:]
        else:
            groups = [layers[i : i + count] for i in range(0, len(layers), count)]
            rest = []
        for group in groups:
            x_sbh = checkpoint(self._run, group, x_sbh, context, rotary, use_reentrant=False, preserve_rng_state=False)
        return self._run(rest, x_sbh, context, rotary)

    @staticmethod
    def _run(
        layers: list[TransformerLayer], x_sbh: Tensor, context: ForwardContext, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        for layer in layers:
            x_sbh = layer(x_sbh, context, rotary, layer.dropout_keys(context))
        return x_sbh

    def _rotary(self, x_sbh: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor] | None:
        if self.config.position_embedding_type != "rope":
            return None
        if context.position_ids_bs is not None:
            positions_sb = context.position_ids_bs.t()
        else:
            length = x_sbh.shape[0] * (self.comm.size if self.comm.sequence_parallel else 1)
            positions_sb = torch.arange(length, device=x_sbh.device).unsqueeze(1)
        return rotary_tables(positions_sb, self.config, self.dtype)

    def loss(self, x_sbh: Tensor, labels_bs: Tensor, weights_bs: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of the tokens' losses (scalar), and the losses themselves (b, s); last stage only."""
        x_sbh = self.final_layernorm(x_sbh)
        total, losses_sb = head_loss(x_sbh, self.output_weight, labels_bs.t(), weights_bs.t(), self.comm, self.shard)
        return total, losses_sb.t()

    def logits(self, x_sbh: Tensor) -> Tensor:
        """Logits (s, b, vocab_size) without padding, the same on every tensor-parallel rank; no gradient."""
        with torch.no_grad():
            x_sbh = self.final_layernorm(x_sbh)
            if self.comm.sequence_parallel:
                x_sbh = self.comm.gather(x_sbh, Point.TP_FWD)
            local = x_sbh @ self.output_weight.t()
            if self.comm.size > 1:
                local = torch.cat(list(self.comm.gather_exact(local)), dim=-1)
            return local[..., : self.shard.vocab_size]
