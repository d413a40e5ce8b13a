"""LayerNorm and RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.rank_context import RankContext
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule


class Norm(ShardedModule):
    """LayerNorm or RMSNorm over the last dimension: (s, b, h) -> (s, b, h), or (s, b, heads, d) for ``of_heads``.

    ``width`` is the size of that dimension; None for the hidden size.

    With ``apply_layernorm_1p``, 1 is added to the weights, and the norm computed, in at least fp32.

    Parameter gradients are partial sums under sequence parallelism, where each rank sees a slice of the sequence, and
    for ``of_heads``, where each rank has separate heads.
    """

    def __init__(self, rank: RankContext, width: int | None = None, of_heads: bool = False) -> None:
        super().__init__()
        config = rank.config
        hidden = width or config.hidden_size
        self.eps = config.norm_epsilon
        self.centered = config.normalization == "LayerNorm"
        self.shape = (hidden,)
        self.one_plus = config.apply_layernorm_1p
        self.weight = nn.Parameter(torch.full(self.shape, 1.0 - self.one_plus, device=rank.device, dtype=rank.dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=rank.device, dtype=rank.dtype)) if self.centered else None
        partial_grad = rank.tensor.size > 1 if of_heads else rank.tensor.sequence_parallel
        for name in ("weight", "bias") if self.centered else ("weight",):
            self.specs[name] = ParamSpec(self.shape, partial_grad=partial_grad)

    def forward(self, x_sbh: Tensor) -> Tensor:
        # The residual stream may have a wider dtype than the parameters; the output has the parameters' dtype.
        if self.one_plus:
            x_sbh = x_sbh.to(torch.promote_types(x_sbh.dtype, torch.float32))
        weight = self.weight.to(x_sbh.dtype)
        if self.one_plus:
            weight = 1.0 + weight
        if self.bias is not None:
            normed = F.layer_norm(x_sbh, self.shape, weight, self.bias.to(x_sbh.dtype), self.eps)
        else:
            normed = F.rms_norm(x_sbh, self.shape, weight, self.eps)
        return normed.to(self.weight.dtype)
