"""Transformer layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from torch import Tensor, nn

from megatron.models.attention import CrossAttention, SelfAttention
from megatron.models.context import ForwardContext, LayerDropout
from megatron.models.experts import Experts
from megatron.models.mlp import MLP
from megatron.models.norm import Norm
from megatron.models.rank_context import RankContext
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.random import SiteKeys


def hidden_dropout(x_sbh: Tensor, p: float, keys: SiteKeys | None, site: int, comm: TensorComm) -> Tensor:
    """Apply dropout to activations that tensor-parallel ranks replicate or split along the sequence."""
    if p == 0.0 or keys is None:
        return x_sbh
    num_slices = comm.size if comm.sequence_parallel else 1
    mask_sbh = keys.keep_mask(site, (x_sbh.shape[0] * num_slices, x_sbh.shape[2]), p, x_sbh).transpose(0, 1)
    return x_sbh * (comm.local_slice(mask_sbh) if num_slices > 1 else mask_sbh)


class Layer(nn.Module, ABC):
    """Base class of transformer layers: (s, b, h) -> (s, b, h)."""

    sites: tuple[str, ...] = ("attention-output", "mlp-output")
    """Names of the residual branches, for the keys of their dropout masks."""
    self_attention: SelfAttention

    def __init__(self, rank: RankContext, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.comm = rank.tensor
        self.dropout = rank.config.hidden_dropout

    @abstractmethod
    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        positions: tuple[Tensor, Tensor] | None,
        dropout: LayerDropout | None,
    ) -> Tensor:
        """Output of the layer; ``positions`` come from ``Stage``."""

    def _add_residual(
        self,
        branch: tuple[Tensor, Tensor | None],
        residual_sbh: Tensor,
        dropout: LayerDropout | None,
        site: int,
        norm: Norm | None = None,
    ) -> Tensor:
        out_sbh, bias = branch
        if bias is not None:
            out_sbh = out_sbh + bias
        if norm is not None:
            out_sbh = norm(out_sbh)
        keys = None if dropout is None else dropout.hidden
        return residual_sbh + hidden_dropout(out_sbh, self.dropout, keys, site, self.comm)

    def dropout_keys(self, context: ForwardContext) -> LayerDropout | None:
        """Keys of this layer's dropout masks; computed outside ``forward``, which may be compiled."""
        keys = context.dropout
        if keys is None:
            return None
        hidden = keys.at(*((self.layer, site) for site in self.sites))
        return LayerDropout(hidden, self.self_attention.dropout_keys(keys))


class TransformerLayer(Layer):
    """Pre-norm attention and MLP with dropout and residuals, in sequence or in parallel.

    Sandwich norms also normalize the outputs of attention and MLP, before dropout.
    """

    def __init__(self, rank: RankContext, layer: int, causal: bool) -> None:
        super().__init__(rank, layer)
        config = rank.config
        self.parallel = config.parallel_residual
        self.input_layernorm = Norm(rank)
        self.self_attention = SelfAttention(rank.at(f"{layer}.self_attention"), layer, causal)
        self.post_attention_layernorm = Norm(rank)
        self.mlp: MLP | Experts = (
            Experts(rank.at(f"{layer}.mlp"), layer) if layer in config.expert_layers else MLP(rank.at(f"{layer}.mlp"))
        )
        self.post_self_attn_layernorm: Norm | None = None
        self.post_mlp_layernorm: Norm | None = None
        if config.sandwich_norm:
            self.post_self_attn_layernorm = Norm(rank)
            self.post_mlp_layernorm = Norm(rank)

    def _add_self_attention(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        positions: tuple[Tensor, Tensor] | None,
        dropout: LayerDropout | None,
    ) -> Tensor:
        """Apply self-attention and add the residual."""
        keys = None if dropout is None else dropout.attention
        branch = self.self_attention(self.input_layernorm(x_sbh), context, positions, keys)
        return self._add_residual(branch, x_sbh, dropout, 0, self.post_self_attn_layernorm)

    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        positions: tuple[Tensor, Tensor] | None,
        dropout: LayerDropout | None,
    ) -> Tensor:
        residual_sbh = self._add_self_attention(x_sbh, context, positions, dropout)
        mlp_input = x_sbh if self.parallel else residual_sbh
        branch = self.mlp(self.post_attention_layernorm(mlp_input), context)
        return self._add_residual(branch, residual_sbh, dropout, 1, self.post_mlp_layernorm)


class DecoderLayer(TransformerLayer):
    """Decoder layer: causal self-attention, cross-attention to the encoder, then the MLP."""

    sites = (*TransformerLayer.sites, "cross-attention-output")

    def __init__(self, rank: RankContext, layer: int) -> None:
        super().__init__(rank, layer, causal=True)
        self.cross_attention = CrossAttention(rank.at(f"{layer}.cross_attention"), layer)
        self.post_cross_attention_layernorm = Norm(rank)

    def dropout_keys(self, context: ForwardContext) -> LayerDropout | None:
        keys = super().dropout_keys(context)
        if keys is None or context.dropout is None:
            return None
        return replace(keys, cross=self.cross_attention.dropout_keys(context.dropout))

    def forward(
        self,
        x_sbh: Tensor,
        context: ForwardContext,
        positions: tuple[Tensor, Tensor] | None,
        dropout: LayerDropout | None,
    ) -> Tensor:
        residual_sbh = self._add_self_attention(x_sbh, context, positions, dropout)
        keys = None if dropout is None else dropout.cross
        branch = self.cross_attention(self.post_attention_layernorm(residual_sbh), context, keys)
        residual_sbh = self._add_residual(branch, residual_sbh, dropout, 2)
        branch = self.mlp(self.post_cross_attention_layernorm(residual_sbh), context)
        return self._add_residual(branch, residual_sbh, dropout, 1)
