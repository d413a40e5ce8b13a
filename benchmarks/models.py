"""Shapes of models, and peers: a GPT-2 of torch's modules in nanoGPT's form, and Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.config.model import ModelConfig
from megatron.models.flops import model_flops_per_sample

VOCAB = 50257
PEER_VOCAB = 50304
"""GPT-2's vocabulary, padded to a multiple of 64 as in nanoGPT."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the sequences of a step.

    Args:
        layers, hidden, seq, vocab: sizes of the model.
        batch: sequences per micro-batch.
        micro_batches: micro-batches per step.
        llama: Llama's architecture (RMSNorm, SwiGLU, grouped queries, rotary positions, no biases, untied) or GPT-2's.
        ffn, groups: feed-forward size and key-value groups of Llama's architecture.
        experts: experts per layer, two for each token (Mixtral); 0 for dense layers.
    """

    layers: int
    hidden: int
    seq: int
    batch: int
    vocab: int = VOCAB
    micro_batches: int = 1
    llama: bool = False
    ffn: int = 0
    groups: int = 0
    experts: int = 0

    @property
    def name(self) -> str:
        form = f"Mixtral {self.experts} x " if self.experts else "Llama " if self.llama else ""
        turns = f" x {self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{form}L{self.layers} h{self.hidden} s{self.seq} b{self.batch}{turns}"

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)

    @property
    def samples(self) -> int:
        """Number of sequences per step."""
        return self.batch * self.micro_batches

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.samples * self.seq

    def flops(self) -> float:
        """Model FLOPs of a step."""
        model = ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn or 4 * self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups or self.heads,
            kv_channels=self.hidden // self.heads,
            seq_length=self.seq,
            swiglu=self.llama,
            num_experts=[self.experts] if self.experts else [],
            moe_router_topk=2,
            moe_ffn_hidden_size=self.ffn,
        )
        return float(model_flops_per_sample(model, self.vocab) * self.samples)


class _Layer(nn.Module):
    """Pre-norm attention and feed-forward network with residual connections."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_bsh: Tensor) -> Tensor:
        b, s, h = x_bsh.shape
        qkv = self.qkv(self.norms[0](x_bsh)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = (heads.transpose(1, 2) for heads in qkv.unbind(2))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bsh = x_bsh + self.proj(context.transpose(1, 2).reshape(b, s, h))
        activation = functional.gelu(self.up(self.norms[1](x_bsh)), approximate="tanh")
        out_bsh: Tensor = x_bsh + self.down(activation)
        return out_bsh


class PlainGPT(nn.Module):
    """A GPT-2 of torch's modules whose output is the loss."""

    def __init__(self, shape: Shape, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, shape.hidden), nn.Embedding(shape.seq, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        x_bsh = self.tokens(tokens_bs) + self.positions.weight[: tokens_bs.shape[1]]
        for layer in self.layers:
            x_bsh = layer(x_bsh)
        logits_bsv = self.head(self.norm(x_bsh))
        return functional.cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten())


def hugging_face(shape: Shape, use_cache: bool = False) -> Any:
    """Return a random model of transformers, without dropout."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()
    model_class: Any
    config: Any
    if shape.llama:
        form: dict[str, Any] = {
            "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.groups, "max_position_embeddings": shape.seq, "use_cache": use_cache,
            "tie_word_embeddings": False,
        }  # fmt: skip
        if shape.experts:
            # The load-balancing loss is added, as in our model.
            routing: dict[str, Any] = {
                "num_local_experts": shape.experts,
                "output_router_logits": True,
                "router_aux_loss_coef": 0.01,
            }
            model_class, config = MixtralForCausalLM, MixtralConfig(**form, **routing)
        else:
            model_class, config = LlamaForCausalLM, LlamaConfig(**form)
    else:
        model_class, config = GPT2LMHeadModel, GPT2Config(
            vocab_size=shape.vocab, n_positions=shape.seq, n_embd=shape.hidden, n_layer=shape.layers,
            n_head=shape.heads, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=use_cache,
        )  # fmt: skip
    config._attn_implementation = "sdpa"
    return model_class(config)


class HuggingFaceLoss(nn.Module):
    """A model of transformers whose output is the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = hugging_face(shape)

    def forward(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        # The model shifts the labels itself, so it does the same work except for one token.
        loss: Tensor = self.model(input_ids=tokens_bs, labels=labels_bs).loss
        return loss


def cast_experts(model: nn.Module, precision: str, device: str) -> None:
    """Cast the weights of Mixtral's experts to bf16 for training in bf16 on a GPU.

    Autocast does not reach the products of experts: transformers casts their input to the type of the weights, so fp32
    weights would mean fp32 products. With bf16 weights and optimizer states this peer also saves memory and casts.
    """
    if (precision, device) != ("bf16", "cuda"):
        return
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    for module in model.modules():
        if isinstance(module, MixtralExperts):
            module.to(torch.bfloat16)


def peer_training(name: str, shape: Shape, precision: str, device: str, compiled: bool) -> Callable[..., Tensor]:
    """Return a peer's step from micro-batches' tokens and labels (b, s) to the loss, with fused AdamW and clipping.

    Args:
        name: nanogpt or hugging-face.
        shape: shape of the model; nanoGPT's vocabulary is padded.
        precision: fp32, or bf16: autocast over fp32 weights (on a GPU, bf16 weights of experts).
        device: torch's name of the device.
        compiled: whether to compile the model with torch.compile.
    """
    vocab = PEER_VOCAB if name == "nanogpt" and shape.vocab == VOCAB else shape.vocab
    with torch.device(device):
        model: Any = PlainGPT(shape, vocab) if name == "nanogpt" else HuggingFaceLoss(shape)
    if shape.experts:
        cast_experts(model, precision, device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    forward = torch.compile(model) if compiled else model

    def train(tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        for _ in range(shape.micro_batches):
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                loss: Tensor = forward(tokens_bs, labels_bs) / shape.micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return train
