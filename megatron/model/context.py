"""Inputs of a forward pass besides activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from megatron.model.kv_cache import KVCache
from megatron.parallel.tensor.random import DropoutKeys, SiteKeys


@dataclass(frozen=True)
class Memory:
    """What a decoder reads of an encoder.

    Args:
        entered_sbh: the encoder's output, with which the tensor-parallel region of all of its readers has begun.
        segment_ids_bs: 0 for the encoder's text, else padding, which is not read.
    """

    entered_sbh: Tensor
    segment_ids_bs: Tensor | None


@dataclass(frozen=True)
class ExpertContext:
    """What layers with experts are given in training.

    Args:
        micro_batch: number of the micro-batch in the step.
        loss_grad: gradient of the objective, which the layers' own losses share; a scalar.
        shares: by layer, the share of the last step's choices that went to each expert, float64; empty at first.
        seen: takes, by (layer, micro-batch), the number of tokens that each expert was given, int64, and the layer's
            losses without their weights (``ModelConfig.expert_losses``). A recomputation writes the same once more.
    """

    micro_batch: int
    loss_grad: Tensor
    shares: Mapping[int, Tensor]
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of one micro-batch, the same on every stage.

    Args:
        dropout: keys of the dropout masks; None in evaluation.
        position_ids_bs: int64 positions where they are not 0, 1, 2, ... (documents restart), else None.
        segment_ids_bs: number of the segment of each token, (b, s), where attention must not cross segments: documents
            within the sequence, or text and padding; else None.
        types_bs: int64 token types, (b, s), where the model has any, else None.
        decoder_tokens_bs, decoder_segment_ids_bs: int64 tokens that a decoder beside an encoder reads, and their
            segments; the other tensors are then the encoder's.
        memory: what the decoder's layers read of the encoder; None elsewhere.
        experts: what layers with experts are given; None in evaluation.
        cache: keys and values of earlier positions, in generation.
        attention: torch's function, or one with the same arguments in its place.
    """

    dropout: DropoutKeys | None = None
    position_ids_bs: Tensor | None = None
    segment_ids_bs: Tensor | None = None
    types_bs: Tensor | None = None
    decoder_tokens_bs: Tensor | None = None
    decoder_segment_ids_bs: Tensor | None = None
    memory: Memory | None = None
    experts: ExpertContext | None = None
    cache: KVCache | None = None
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention

    def of_any_micro_batch(self) -> ForwardContext:
        """The inputs without what numbers the micro-batch and its samples.

        Where compiled code recomputes something, older versions of torch compile it for all the numbers that it is
        given: anew for each micro-batch.
        """
        return replace(self, dropout=None, experts=None)


@dataclass(frozen=True)
class AttentionDropout:
    """The keys of the dropout masks of one attention's probabilities.

    Args:
        heads: keys of each of this rank's heads; None where no mask is drawn for them.
        fused: seed of the fused CUDA kernel, which draws its own.
    """

    heads: SiteKeys | None
    fused: int


@dataclass(frozen=True)
class LayerDropout:
    """The keys of one layer's dropout masks.

    Args:
        hidden: keys for the outputs of attention, of the feed-forward part, and of cross-attention.
        attention: keys of self-attention.
        cross: keys of cross-attention, where the layer has it.
    """

    hidden: SiteKeys
    attention: AttentionDropout
    cross: AttentionDropout | None = None
