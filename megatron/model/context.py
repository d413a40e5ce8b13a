"""Inputs of a forward pass besides activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron.model.kv_cache import KVCache
from megatron.parallel.tensor.random import DropoutKeys, SiteKeys


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of one micro-batch, the same on every stage.

    Args:
        dropout: keys of the dropout masks; None in evaluation.
        position_ids_bs: int64 positions where they are not 0, 1, 2, ... (documents restart), else None.
        segment_ids_bs: number of the segment of each token, (b, s), where attention must not cross segments: documents
            within the sequence, or text and padding; else None.
        types_bs: int64 token types, (b, s), where the model has any, else None.
        cache: keys and values of earlier positions, in generation.
        attention: torch's function, or one with the same arguments in its place.
    """

    dropout: DropoutKeys | None = None
    position_ids_bs: Tensor | None = None
    segment_ids_bs: Tensor | None = None
    types_bs: Tensor | None = None
    cache: KVCache | None = None
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention


@dataclass(frozen=True)
class LayerDropout:
    """The keys of one layer's dropout masks.

    Args:
        hidden: keys for the outputs of attention and of the feed-forward part.
        attention: keys for the probabilities of each of this rank's heads; None where no mask is drawn for them.
        fused: seed of the fused CUDA kernel, which draws its own.
    """

    hidden: SiteKeys
    attention: SiteKeys | None
    fused: int
