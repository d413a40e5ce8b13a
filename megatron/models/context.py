"""Inputs of a forward pass other than activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from megatron.models.kv_cache import KVCache
from megatron.parallel.expert.router import ExpertContext
from megatron.parallel.tensor.random import DropoutKeys, SiteKeys


@dataclass(frozen=True)
class EncoderOutput:
    """Encoder output, for the decoder's cross-attention.

    Args:
        entered_sbh: encoder output that has entered the tensor-parallel region, shared by all decoder layers.
        segment_ids_bs: 0 for the encoder's text, other values for padding, which is masked.
    """

    entered_sbh: Tensor
    segment_ids_bs: Tensor | None


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of a micro-batch, the same on every stage.

    Args:
        dropout: keys of the dropout masks; None in evaluation.
        position_ids_bs: int64 positions, if they are not 0, 1, 2, ... (documents restart), else None.
        segment_ids_bs: segment number of each token, (b, s), if attention must not cross segments: documents within
            the sequence, or text and padding; else None.
        types_bs: int64 token types, (b, s), if the model has token types, else None.
        decoder_tokens_bs, decoder_segment_ids_bs: int64 tokens and segments of the decoder in an encoder-decoder model;
            the other tensors belong to the encoder.
        memory: encoder output for decoder layers; None elsewhere.
        experts: training state of layers with experts; None in evaluation.
        cache: KV cache of earlier positions, in generation.
        attention: ``F.scaled_dot_product_attention``, or a function with the same arguments.
    """

    dropout: DropoutKeys | None = None
    position_ids_bs: Tensor | None = None
    segment_ids_bs: Tensor | None = None
    types_bs: Tensor | None = None
    decoder_tokens_bs: Tensor | None = None
    decoder_segment_ids_bs: Tensor | None = None
    memory: EncoderOutput | None = None
    experts: ExpertContext | None = None
    cache: KVCache | None = None
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention

    def without_micro_batch(self) -> ForwardContext:
        """Copy of the context without fields that depend on the number of the micro-batch.

        In recomputed regions of compiled code, older versions of torch specialize on all integers, and would recompile
        for each micro-batch.
        """
        return replace(self, dropout=None, experts=None)


@dataclass(frozen=True)
class AttentionDropout:
    """Keys of the dropout masks of attention probabilities.

    Args:
        heads: keys of this rank's heads; None if no mask is drawn outside the fused kernel.
        fused: seed of the fused CUDA kernel, which draws masks itself.
    """

    heads: SiteKeys | None
    fused: int


@dataclass(frozen=True)
class LayerDropout:
    """Keys of a layer's dropout masks.

    Args:
        hidden: keys for the outputs of attention, of the feed-forward part, and of cross-attention.
        attention: keys of self-attention.
        cross: keys of cross-attention; None if the layer has none.
    """

    hidden: SiteKeys
    attention: AttentionDropout
    cross: AttentionDropout | None = None
