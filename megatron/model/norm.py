"""LayerNorm and RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.comm.tensor import TensorComm
from megatron.config.model import ModelConfig
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule, with_partial_grad


class Norm(ShardedModule):
    """Normalizes over the last dimension: (s, b, h) -> (s, b, h), or of heads (s, b, heads, d) -> (s, b, heads, d).

    Weights that are added to 1 may be small numbers of 16 bits: the sum and the product with it then have 32.

    Under sequence parallelism each rank sees a part of the sequence, and of heads each rank always has its own, so the
    gradients of the parameters are partial sums then.
    """

    def __init__(
        self,
        config: ModelConfig,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
        of_heads: bool = False,
    ) -> None:
        super().__init__()
        hidden = config.kv_channels if of_heads else config.hidden_size
        self.eps = config.norm_epsilon
        self.centered = config.normalization == "LayerNorm"
        self.shape = (hidden,)
        self.one_plus = config.apply_layernorm_1p
        self.weight = nn.Parameter(torch.full(self.shape, 1.0 - self.one_plus, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype)) if self.centered else None
        spec = ParamSpec(self.shape)
        for name in ("weight", "bias") if self.centered else ("weight",):
            partial = comm.size > 1 if of_heads else comm.sequence_parallel
            self.specs[name] = with_partial_grad(spec) if partial else spec

    def forward(self, x_sbh: Tensor) -> Tensor:
        # The residual stream may be wider than the parameters; what the norm feeds is not.
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
