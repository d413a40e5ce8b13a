"""Model chunk: a contiguous part of embedding, layers, final norm and losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.models.block import DecoderLayer, Layer, TransformerLayer
from megatron.models.context import ForwardContext
from megatron.models.embedding import Embedding, OutputWeight
from megatron.models.losses import StageLoss, Targets
from megatron.models.norm import Norm
from megatron.models.rank_context import RankContext
from megatron.models.rotary import rotary_tables
from megatron.parallel.tensor.cross_entropy import LogitsWorkspace
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.products import Recipe


@dataclass(frozen=True)
class StagePart:
    """Part of the model in a chunk.

    Args:
        layers: global numbers of the layers.
        first: whether the part has the embedding. The part with a decoder's first layer has a copy.
        last: whether the part has the final norm and the losses.
        shares_words: whether a tied output projection is the embedding of another chunk on this rank.
    """

    layers: range
    first: bool = True
    last: bool = True
    shares_words: bool = False


class Stage(nn.Module, ABC):
    """Layers of a chunk, with the embedding on the first stage and the losses on the last stage.

    Subclasses define the losses of a model type.

    Args:
        rank: model options, and this rank's communication, device and recomputation.
        stage_part: part of the model in this chunk; ``StagePart`` of all layers for the complete model.
        shard: rows of the vocabulary on this rank.
    """

    embedding_type: ClassVar[type[Embedding]] = Embedding
    ends_with_norm: ClassVar[bool] = True

    def __init__(self, rank: RankContext, stage_part: StagePart, shard: VocabShard) -> None:
        super().__init__()
        config = rank.config
        self.config = config
        self.stage_part = stage_part
        self.shard = shard
        self.comm = rank.tensor
        self.dtype = rank.dtype
        self.recompute = rank.recompute
        self.logits_workspace = LogitsWorkspace()
        self._shared_words: tuple[nn.Parameter, ...] = ()  # a tuple, so that this module does not register it again
        tied = config.ties_embeddings
        embeds = stage_part.first or config.begins_decoder(stage_part.layers)
        if embeds:
            self.embedding = self.embedding_type(rank, shard, copy=not stage_part.first)
        self.layers = nn.ModuleDict({str(n): self._make_layer(rank, n) for n in stage_part.layers})
        if stage_part.last:
            if self.ends_with_norm:
                self.final_layernorm = Norm(rank)
            if config.predicts_words and not (tied and (embeds or stage_part.shares_words)):
                self.output_layer = OutputWeight(rank, shard)

    def _make_layer(self, rank: RankContext, number: int) -> Layer:
        if number in rank.config.decoder_layers:
            return DecoderLayer(rank, number)
        return TransformerLayer(rank, number, rank.config.causal)

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of the output projection, (rows, h)."""
        if self._shared_words:
            return self._shared_words[0]
        return self.output_layer.weight if hasattr(self, "output_layer") else self.embedding.word_embeddings.weight

    def share_words(self, first: Stage) -> None:
        """Use the embedding of the model's first chunk as output projection."""
        self._shared_words = (first.embedding.word_embeddings.weight,)

    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers.values()))

    def compile_layers(self, backend: str = "inductor", lengths_vary: bool = False) -> None:
        """Compile all layers with ``torch.compile``, except layers with experts.

        Layers share compiled code; training and evaluation have separate code.

        Args:
            backend: name of the ``torch.compile`` backend.
            lengths_vary: whether sequence lengths vary; at the second length, layers are compiled for dynamic lengths.
        """
        for layer in self._layers():
            if layer.layer in self.config.expert_layers:
                continue  # the number of tokens per expert varies
            layer.compile(dynamic=None if lengths_vary else False, backend=backend)

    def compute_in_fp8(self, recipe: Recipe | None) -> None:
        """Compute the layers' matrix products in fp8 from now on (None: in the dtype of the parameters).

        The embedding and the output layer keep their precision.
        """
        for module in self.layers.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.compute_in_fp8(recipe)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map tokens (b, s) on the first stage, or activations (s, b, h), to activations (s, b, h)."""
        x_sbh = self.embedding(x, context) if self.stage_part.first else x
        return self._run_layers(self._layers(), x_sbh, context)

    def _run_layers(self, layers: Sequence[Layer], x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Run layers in sequence; with full recomputation, backward recomputes them."""
        positions = self._position_tables(x_sbh, context)
        full = self.recompute.recompute_granularity == "full" and torch.is_grad_enabled()
        if not full:
            return self._run_group(layers, x_sbh, context, positions)
        count = self.recompute.recompute_num_layers
        if self.recompute.recompute_method == "block":
            groups: list[Sequence[Layer]] = [[layer] for layer in layers[:count]]
            remaining_layers = layers[count:]
        else:
            groups = [layers[i : i + count] for i in range(0, len(layers), count)]
            remaining_layers = ()
        for group in groups:
            inputs = (group, x_sbh, context, positions)
            x_sbh = checkpoint(self._run_group, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self._run_group(remaining_layers, x_sbh, context, positions)

    @staticmethod
    def _run_group(
        layers: Sequence[Layer], x_sbh: Tensor, context: ForwardContext, positions: Mapping[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        for layer in layers:
            x_sbh = layer(x_sbh, context, positions.get(layer.layer), layer.dropout_keys(context))
        return x_sbh

    def _position_tables(self, x_sbh: Tensor, context: ForwardContext) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Rotary tables by layer number; empty without rotary embedding."""
        if self.config.position_embedding_type != "rope":
            return {}
        if context.position_ids_bs is not None:
            positions_sb = context.position_ids_bs.t()
        else:
            length = x_sbh.shape[0] * (self.comm.size if self.comm.sequence_parallel else 1)
            positions_sb = torch.arange(length, device=x_sbh.device).unsqueeze(1)
        has_local = self.config.rope_local_base_freq is not None
        is_local = {n: has_local and self.config.window_of(n) is not None for n in self.stage_part.layers}
        tables = {kind: rotary_tables(positions_sb, self.config, self.dtype, kind) for kind in set(is_local.values())}
        return {n: tables[is_local[n]] for n in self.stage_part.layers}

    def counts(self, targets: Targets) -> Tensor:
        """Count the unmasked labels (tokens or samples) of a micro-batch, for each loss of the model."""
        return targets.mask_bs.sum().unsqueeze(0)

    @abstractmethod
    def loss(self, x_sbh: Tensor, targets: Targets, divisors: Tensor | None = None) -> StageLoss:
        """Compute the losses of a micro-batch; last stage only.

        Args:
            x_sbh: output of ``forward``.
            targets: labels.
            divisors: divisor of each loss's sum in the objective; None for the size of the micro-batch.
        """
