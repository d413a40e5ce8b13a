"""Megatron's T5: encoder and decoder with learned positions and a shared embedding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.models.context import EncoderOutput, ForwardContext
from megatron.models.losses import LossSum, StageLoss, Targets, token_weights
from megatron.models.norm import Norm
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage, StagePart
from megatron.parallel.tensor.collectives import enter_parallel_region
from megatron.parallel.tensor.cross_entropy import head_loss
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.shards import ShardedModule


class OutputBias(ShardedModule):
    """Bias of the output projection; its weight is the embedding."""

    def __init__(self, shard: VocabShard, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias, self.specs["bias"] = shard.bias(device, dtype)


class T5Stage(Stage):
    """A stage of T5: layers of the encoder, of the decoder, or of both.

    Encoder layers come first. Every decoder layer attends to the encoder output after its final norm. Decoder stages
    therefore pass both activations as a single tensor (s + s', b, h): the decoder's s positions, then the encoder's s'.
    Under sequence parallelism it is the concatenation of the rank's slices of both.
    """

    def __init__(self, rank: RankContext, stage_part: StagePart, shard: VocabShard) -> None:
        super().__init__(rank, stage_part, shard)
        config = rank.config
        decoder = config.decoder_layers
        layers = self._layers()
        self.encoder_size = sum(layer.layer not in decoder for layer in layers)
        self.begins_decoder = config.begins_decoder(stage_part.layers)
        self.ends_encoder = decoder.start - 1 in stage_part.layers
        if self.ends_encoder:
            self.encoder_final_layernorm = Norm(rank)
        if stage_part.last:
            self.lm_head = OutputBias(shard, rank.device, rank.dtype)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map encoder tokens (b, s') on the first stage, or the previous stage's output, to activations: (s', b, h) of
        the encoder, (s + s', b, h) of decoder and encoder, or (s, b, h) of the decoder on the last stage."""
        layers = self._layers()
        if self.encoder_size:
            x_sbh = self.embedding(x, context) if self.stage_part.first else x
            x = self._run_layers(layers[: self.encoder_size], x_sbh, context)
            if self.ends_encoder:
                x = self.encoder_final_layernorm(x)
        if self.encoder_size == len(layers):
            return x

        decoder_context = replace(context, position_ids_bs=None, segment_ids_bs=context.decoder_segment_ids_bs)
        if self.begins_decoder:
            assert context.decoder_tokens_bs is not None
            encoder_sbh = x
            x_sbh = self.embedding(context.decoder_tokens_bs, decoder_context, site="decoder-embedding")
        else:
            length = (self.config.decoder_seq_length or 0) // (self.comm.size if self.comm.sequence_parallel else 1)
            x_sbh, encoder_sbh = x[:length], x[length:]
        # Enter the region once for all layers, so that they communicate neither the memory nor its gradient.
        entered_sbh = enter_parallel_region(encoder_sbh.to(self.dtype), self.comm.at("memory"))
        memory = EncoderOutput(entered_sbh, context.segment_ids_bs)
        x_sbh = self._run_layers(layers[self.encoder_size :], x_sbh, replace(decoder_context, memory=memory))
        return x_sbh if self.stage_part.last else torch.cat([x_sbh, encoder_sbh])

    def loss(self, x_sbh: Tensor, targets: Targets, divisors: Tensor | None = None) -> StageLoss:
        x_sbh = self.final_layernorm(x_sbh)
        labels_sb, weights_sb = targets.labels_bs.t(), token_weights(targets.mask_bs, divisors).t()
        args = (self.output_weight, labels_sb, weights_sb, self.comm, self.shard, self.lm_head.bias)
        objective, losses_sb = head_loss(x_sbh, *args, workspace=self.logits_workspace)
        total = (losses_sb.t() * targets.mask_bs).sum()
        return StageLoss(objective, (LossSum(total, targets.mask_bs.sum()),))
