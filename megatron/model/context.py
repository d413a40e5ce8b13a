"""What a forward pass is given besides activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.model.kv_cache import KVCache
from megatron.parallel.tensor.random import DropoutKeys


@dataclass(frozen=True)
class ForwardContext:
    """One micro-batch's circumstances, the same on every stage.

    Args:
        dropout: keys of the dropout masks; None in evaluation.
        position_ids_bs: int64 positions where they are not 0, 1, 2, ... (documents restart), else None.
        segment_ids_bs: number of the document within the sequence, (b, s), where attention must not cross
            documents, else None.
        cache: what attention keeps of earlier positions, in generation.
    """

    dropout: DropoutKeys | None = None
    position_ids_bs: Tensor | None = None
    segment_ids_bs: Tensor | None = None
    cache: KVCache | None = None
