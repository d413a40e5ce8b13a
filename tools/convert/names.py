"""Which tensors of Hugging Face's GPT-2 and Llama are which of ours, and how one becomes the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.errors import UserError
from megatron.config.model import ModelConfig

Views = Callable[[Tensor], Sequence[Tensor]]
Joined = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Rule:
    """One of our tensors.

    Args:
        ours: its logical name.
        shape: its logical shape.
        theirs: names and shapes of the tensors that hold its elements there.
        split: ours to theirs: views whose elements, in order, are those of their tensors.
        join: theirs to ours, in its shape.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[tuple[str, tuple[int, ...]], ...]
    split: Views
    join: Joined


def _same(ours: str, theirs: str, *shape: int) -> Rule:
    return Rule(ours, shape, ((theirs, shape),), lambda x: [x], lambda parts: parts[0])


def _transposed(ours: str, theirs: str, rows: int, columns: int) -> Rule:
    """GPT-2 keeps the weights of products transposed."""
    return Rule(ours, (rows, columns), ((theirs, (columns, rows)),), lambda x: [x.t()], lambda parts: parts[0].t())


def architecture_of(model: ModelConfig) -> str:
    """gpt2 or llama.

    Raises:
        UserError: when the model is neither, with what keeps it from being one.
    """
    heads_fill = model.num_attention_heads * model.kv_channels == model.hidden_size
    gpt2 = {
        "--position-embedding-type learned_absolute": model.position_embedding_type == "learned_absolute",
        "--normalization LayerNorm": model.normalization == "LayerNorm",
        "no --swiglu": not model.swiglu,
        "no --squared-relu": not model.squared_relu,
        "biases": model.add_bias_linear,
        "a key and value for each head": model.num_query_groups == model.num_attention_heads,
        "--kv-channels of hidden size / heads": heads_fill,
    }
    llama = {
        "--position-embedding-type rope": model.position_embedding_type == "rope",
        "--rotary-percent 1": model.rotary_percent == 1.0,
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        "--swiglu": model.swiglu,
        "--disable-bias-linear": not model.add_bias_linear,
    }
    for name, wanted in (("gpt2", gpt2), ("llama", llama)):
        if all(wanted.values()):
            return name
    missing = {
        name: [what for what, met in wanted.items() if not met] for name, wanted in (("GPT-2", gpt2), ("Llama", llama))
    }
    closest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"Hugging Face has no architecture for this model: it is closest to {closest}, which has "
        f"{', '.join(missing[closest])}; keep it in our own format, or train one of these"
    )


def rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """All tensors of a model, in the order of the forward pass."""
    yield from (gpt2_rules if architecture_of(model) == "gpt2" else llama_rules)(model, vocab_size)


def gpt2_rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """GPT2LMHeadModel."""
    h, ffn, heads, width = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads, model.kv_channels
    yield _same("embedding.word_embeddings.weight", "transformer.wte.weight", vocab_size, h)
    positions = "embedding.position_embeddings.weight"
    yield _same(positions, "transformer.wpe.weight", model.max_position_embeddings, h)
    for number in range(model.num_layers):
        at, there = f"layers.{number}.", f"transformer.h.{number}."
        for kind in ("weight", "bias"):
            yield _same(f"{at}input_layernorm.{kind}", f"{there}ln_1.{kind}", h)
        # Theirs: all queries, all keys, all values. Ours: query, key and value of each head.
        yield Rule(
            f"{at}self_attention.query_key_value.weight",
            (3 * h, h),
            ((f"{there}attn.c_attn.weight", (h, 3 * h)),),
            lambda x: [x.view(heads, 3, width, h).permute(3, 1, 0, 2)],
            lambda parts: parts[0].view(h, 3, heads, width).permute(2, 1, 3, 0).reshape(3 * h, h),
        )
        yield Rule(
            f"{at}self_attention.query_key_value.bias",
            (3 * h,),
            ((f"{there}attn.c_attn.bias", (3 * h,)),),
            lambda x: [x.view(heads, 3, width).transpose(0, 1)],
            lambda parts: parts[0].view(3, heads, width).transpose(0, 1).reshape(3 * h),
        )
        yield _transposed(f"{at}self_attention.dense.weight", f"{there}attn.c_proj.weight", h, h)
        yield _same(f"{at}self_attention.dense.bias", f"{there}attn.c_proj.bias", h)
        for kind in ("weight", "bias"):
            yield _same(f"{at}post_attention_layernorm.{kind}", f"{there}ln_2.{kind}", h)
        yield _transposed(f"{at}mlp.dense_h_to_4h.weight", f"{there}mlp.c_fc.weight", ffn, h)
        yield _same(f"{at}mlp.dense_h_to_4h.bias", f"{there}mlp.c_fc.bias", ffn)
        yield _transposed(f"{at}mlp.dense_4h_to_h.weight", f"{there}mlp.c_proj.weight", h, ffn)
        yield _same(f"{at}mlp.dense_4h_to_h.bias", f"{there}mlp.c_proj.bias", h)
    for kind in ("weight", "bias"):
        yield _same(f"final_layernorm.{kind}", f"transformer.ln_f.{kind}", h)
    if model.untie_embeddings_and_output_weights:
        yield _same("output_layer.weight", "lm_head.weight", vocab_size, h)


def llama_rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """LlamaForCausalLM."""
    h, ffn, groups, width = model.hidden_size, model.ffn_hidden_size, model.num_query_groups, model.kv_channels
    queries = model.num_attention_heads // groups
    sizes = (queries * width, width, width)
    yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocab_size, h)
    for number in range(model.num_layers):
        at, there = f"layers.{number}.", f"model.layers.{number}."
        yield _same(f"{at}input_layernorm.weight", f"{there}input_layernorm.weight", h)
        # Ours holds the queries, the key and the value of each group together.
        yield Rule(
            f"{at}self_attention.query_key_value.weight",
            (groups * sum(sizes), h),
            tuple((f"{there}self_attn.{q}_proj.weight", (groups * s, h)) for q, s in zip("qkv", sizes, strict=True)),
            lambda x: x.view(groups, sum(sizes), h).split(sizes, dim=1),
            lambda parts: torch.cat([part.view(groups, -1, h) for part in parts], dim=1).view(-1, h),
        )
        wide = model.num_attention_heads * width
        yield _same(f"{at}self_attention.dense.weight", f"{there}self_attn.o_proj.weight", h, wide)
        yield _same(f"{at}post_attention_layernorm.weight", f"{there}post_attention_layernorm.weight", h)
        yield Rule(
            f"{at}mlp.dense_h_to_4h.weight",
            (2, ffn, h),
            tuple((f"{there}mlp.{name}_proj.weight", (ffn, h)) for name in ("gate", "up")),
            lambda x: x.unbind(0),
            lambda parts: torch.stack(list(parts)),
        )
        yield _same(f"{at}mlp.dense_4h_to_h.weight", f"{there}mlp.down_proj.weight", h, ffn)
    yield _same("final_layernorm.weight", "model.norm.weight", h)
    if model.untie_embeddings_and_output_weights:
        yield _same("output_layer.weight", "lm_head.weight", vocab_size, h)
