"""Embeddings, and the output projection, optionally tied to the embedding."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.distributed.layout import Tie
from megatron.models.block import hidden_dropout
from megatron.models.context import ForwardContext
from megatron.models.rank_context import RankContext
from megatron.parallel.tensor.embedding import VocabParallelEmbedding, VocabShard, look_up_rows
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule

TIED_NAME = "embedding.word_embeddings.weight"
"""Logical name of the tied embedding, on any stage."""


class Embedding(ShardedModule):
    """Embeddings of tokens, positions and token types, with dropout: (b, s) -> (s, b, h), or this rank's slice of s.

    Args:
        rank: the model, and the rank's communication and device.
        shard: rows of the vocabulary on this rank.
        copy: whether this is a tied copy; another stage holds the tables first.
    """

    def __init__(self, rank: RankContext, shard: VocabShard, copy: bool = False) -> None:
        super().__init__()
        config = rank.config
        self.comm = rank.tensor
        self.dropout = config.hidden_dropout
        self.residual_dtype = config.residual_dtype(rank.dtype)
        self.scale: float | None = None
        if config.apply_embedding_scaling:
            exact = torch.tensor(math.sqrt(config.hidden_size), dtype=torch.float64, device="cpu")
            self.scale = float(exact.to(rank.dtype))
        tied = config.ties_embeddings
        self.word_embeddings = VocabParallelEmbedding(
            shard, config.hidden_size, tied, rank.tensor, rank.device, rank.dtype, copy
        )
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(rank, copy)
        self.tokentype_embeddings: TypeEmbedding | None = None
        if config.num_tokentypes:
            self.tokentype_embeddings = TypeEmbedding(rank)

    def forward(self, tokens_bs: Tensor, context: ForwardContext, site: str = "embedding") -> Tensor:
        """Embed tokens; ``site`` is the key of the dropout masks and of the messages' compression noise."""
        x_sbh = self._sum_embeddings(tokens_bs, context, site)
        keys = None if context.dropout is None else context.dropout.at((site,))
        return hidden_dropout(x_sbh, self.dropout, keys, 0, self.comm)

    def _sum_embeddings(self, tokens_bs: Tensor, context: ForwardContext, site: str) -> Tensor:
        x_sbh: Tensor = self.word_embeddings(tokens_bs, site)
        if self.scale is not None:
            x_sbh = x_sbh * self.scale
        if self.position_embeddings is not None:
            x_sbh = x_sbh + self.position_embeddings(tokens_bs, context)
        if self.tokentype_embeddings is not None:
            assert context.types_bs is not None
            x_sbh = x_sbh + self.tokentype_embeddings(context.types_bs)
        return x_sbh.to(self.residual_dtype)


class _Table(ShardedModule):
    """A table of ``rows`` learned vectors, replicated on tensor-parallel ranks."""

    def __init__(self, rank: RankContext, rows: int) -> None:
        super().__init__()
        hidden = rank.config.hidden_size
        self.comm = rank.tensor
        self.weight = nn.Parameter(torch.empty((rows, hidden), device=rank.device, dtype=rank.dtype))
        self.specs["weight"] = ParamSpec((rows, hidden), partial_grad=rank.tensor.sequence_parallel)

    def look_up(self, index_sb: Tensor) -> Tensor:
        """Vectors of this rank's slice of a sequence."""
        return look_up_rows(self.weight, self.comm.local_slice(index_sb) if self.comm.sequence_parallel else index_sb)


class TypeEmbedding(_Table):
    """A learned vector per token type."""

    def __init__(self, rank: RankContext) -> None:
        super().__init__(rank, rank.config.num_tokentypes)

    def forward(self, types_bs: Tensor) -> Tensor:
        """Vectors (s, b, h) of the types."""
        return self.look_up(types_bs.t())


class PositionEmbedding(_Table):
    """A learned vector per position, shared by encoder and decoder."""

    def __init__(self, rank: RankContext, copy: bool) -> None:
        super().__init__(rank, rank.config.max_position_embeddings)
        if rank.config.decoder_layers:
            self.specs["weight"] = replace(self.specs["weight"], tied=Tie.POSITIONS, tied_copy=copy)

    def forward(self, tokens_bs: Tensor, context: ForwardContext) -> Tensor:
        """Vectors (s, 1 or b, h) of the positions."""
        if context.position_ids_bs is None:
            positions_sb = torch.arange(tokens_bs.shape[1], device=tokens_bs.device).unsqueeze(1)
        else:
            positions_sb = context.position_ids_bs.t()
        return self.look_up(positions_sb)


class OutputWeight(ShardedModule):
    """Output projection: a separate parameter, or the last stage's copy of the tied embedding."""

    def __init__(self, rank: RankContext, shard: VocabShard) -> None:
        super().__init__()
        tied, hidden = rank.config.ties_embeddings, rank.config.hidden_size
        self.weight = shard.weight(hidden, rank.device, rank.dtype)
        self.specs["weight"] = shard.spec(hidden, tied=tied, tied_copy=tied)
        if tied:
            self.logical_names["weight"] = TIED_NAME
