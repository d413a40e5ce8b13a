"""Copies a Hugging Face model's weights into ours, and maps gradients to parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.bert import BertStage
from megatron.models.gpt import GPTStage


def gpt2_pairs(theirs: Any, ours: GPTStage) -> Iterator[tuple[str, list[Tensor]]]:
    """(our parameter's name, their parameters that ``to_ours`` converts to it) for GPT2LMHeadModel."""
    body = theirs.transformer
    yield "embedding.word_embeddings.weight", [body.wte.weight]
    yield "embedding.position_embeddings.weight", [body.wpe.weight]
    for number, block in enumerate(body.h):
        at = f"layers.{number}."
        for kind in ("weight", "bias"):
            yield f"{at}input_layernorm.{kind}", [getattr(block.ln_1, kind)]
            yield f"{at}post_attention_layernorm.{kind}", [getattr(block.ln_2, kind)]
            yield f"{at}self_attention.query_key_value.{kind}", [getattr(block.attn.c_attn, kind)]
            yield f"{at}self_attention.dense.{kind}", [getattr(block.attn.c_proj, kind)]
            yield f"{at}mlp.dense_h_to_4h.{kind}", [getattr(block.mlp.c_fc, kind)]
            yield f"{at}mlp.dense_4h_to_h.{kind}", [getattr(block.mlp.c_proj, kind)]
    yield "final_layernorm.weight", [body.ln_f.weight]
    yield "final_layernorm.bias", [body.ln_f.bias]


def gpt2_to_ours(name: str, tensors: list[Tensor], heads: int) -> Tensor:
    """GPT-2 stores products' weights transposed, and query, key and value concatenated."""
    (x,) = tensors
    if "query_key_value" in name:
        x = x.t() if x.dim() == 2 else x
        rows = x.view(3, heads, -1, *x.shape[1:]).transpose(0, 1)
        return rows.reshape(x.shape)
    if ("dense" in name) and x.dim() == 2:
        return x.t()
    return x


def bert_pairs(theirs: Any, ours: BertStage) -> Iterator[tuple[str, list[Tensor]]]:
    """The same for MegatronBertForPreTraining and MegatronBertForMaskedLM."""
    head = theirs.cls.predictions
    yield from bert_body_pairs(theirs.bert)
    modules: list[tuple[str, list[Any]]] = [
        ("lm_head.dense", [head.transform.dense]),
        ("lm_head.layernorm", [head.transform.LayerNorm]),
    ]
    if hasattr(ours, "binary_head"):
        pooler = theirs.bert.pooler.dense
        modules += [("binary_head.pooler", [pooler]), ("binary_head.order", [theirs.cls.seq_relationship])]
    yield from _weights_and_biases(modules)
    yield "lm_head.bias", [head.decoder.bias]


@torch.no_grad()
def bert_logits(stage: BertStage, x_sbh: Tensor) -> Tensor:
    """Logits (s, b, vocab_size) of a stage's outputs on a single rank; no gradient."""
    states_sbh = stage.lm_head(stage.final_layernorm(x_sbh))
    return F.linear(states_sbh, stage.output_weight, stage.lm_head.bias)[..., : stage.shard.vocab_size]


def bert_task_pairs(theirs: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """The same for MegatronBertForSequenceClassification and MegatronBertForMultipleChoice."""
    yield from bert_body_pairs(theirs.bert)
    head = [("classification_head.pooler", [theirs.bert.pooler.dense])]
    yield from _weights_and_biases([*head, ("classification_head.classifier", [theirs.classifier])])


def _weights_and_biases(modules: list[tuple[str, list[Any]]]) -> Iterator[tuple[str, list[Tensor]]]:
    for name, modules_of_name in modules:
        for kind in ("weight", "bias"):
            yield f"{name}.{kind}", [getattr(module, kind) for module in modules_of_name]


def bert_body_pairs(body: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """The same for the layers that all of Megatron's BERTs have."""
    yield "embedding.word_embeddings.weight", [body.embeddings.word_embeddings.weight]
    yield "embedding.position_embeddings.weight", [body.embeddings.position_embeddings.weight]
    yield "embedding.tokentype_embeddings.weight", [body.embeddings.token_type_embeddings.weight]
    modules: list[tuple[str, list[Any]]] = [("final_layernorm", [body.encoder.ln])]
    for number, block in enumerate(body.encoder.layer):
        attention = block.attention
        self_attention = attention.self
        modules += [
            (f"layers.{number}.input_layernorm", [attention.ln]),
            (
                f"layers.{number}.self_attention.query_key_value",
                [self_attention.query, self_attention.key, self_attention.value],
            ),
            (f"layers.{number}.self_attention.dense", [attention.output.dense]),
            (f"layers.{number}.post_attention_layernorm", [block.ln]),
            (f"layers.{number}.mlp.dense_h_to_4h", [block.intermediate.dense]),
            (f"layers.{number}.mlp.dense_4h_to_h", [block.output.dense]),
        ]
    yield from _weights_and_biases(modules)


def bert_to_ours(name: str, tensors: list[Tensor], heads: int) -> Tensor:
    """BERT keeps query, key and value apart."""
    if "query_key_value" not in name:
        return tensors[0]
    return torch.stack([tensor.view(heads, -1, *tensor.shape[1:]) for tensor in tensors], dim=1).flatten(0, 2)


def llama_pairs(theirs: Any, ours: GPTStage) -> Iterator[tuple[str, list[Tensor]]]:
    """The same for LlamaForCausalLM, Gemma2ForCausalLM and Gemma3ForCausalLM."""
    body = theirs.model
    yield "embedding.word_embeddings.weight", [body.embed_tokens.weight]
    for number, block in enumerate(body.layers):
        at, attention = f"layers.{number}.", block.self_attn
        yield f"{at}input_layernorm.weight", [block.input_layernorm.weight]
        if hasattr(block, "pre_feedforward_layernorm"):
            yield f"{at}post_self_attn_layernorm.weight", [block.post_attention_layernorm.weight]
            yield f"{at}post_attention_layernorm.weight", [block.pre_feedforward_layernorm.weight]
            yield f"{at}post_mlp_layernorm.weight", [block.post_feedforward_layernorm.weight]
        else:
            yield f"{at}post_attention_layernorm.weight", [block.post_attention_layernorm.weight]
        if hasattr(attention, "q_norm"):
            yield f"{at}self_attention.q_layernorm.weight", [attention.q_norm.weight]
            yield f"{at}self_attention.k_layernorm.weight", [attention.k_norm.weight]
        yield (
            f"{at}self_attention.query_key_value.weight",
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        )
        yield f"{at}self_attention.dense.weight", [attention.o_proj.weight]
        yield f"{at}mlp.dense_h_to_4h.weight", [block.mlp.gate_proj.weight, block.mlp.up_proj.weight]
        yield f"{at}mlp.dense_4h_to_h.weight", [block.mlp.down_proj.weight]
    yield "final_layernorm.weight", [body.norm.weight]
    if hasattr(ours, "output_layer"):
        yield "output_layer.weight", [theirs.lm_head.weight]


def llama_to_ours(name: str, tensors: list[Tensor], groups: int) -> Tensor:
    """Llama keeps these tensors apart, which are fused here: by group (queries, key, value), and (gate, up)."""
    if "query_key_value" in name:
        by_group = [tensor.view(groups, -1, tensor.shape[-1]) for tensor in tensors]
        return torch.cat(by_group, dim=1).reshape(-1, tensors[0].shape[-1])
    if "dense_h_to_4h" in name:
        return torch.stack(tensors)
    return tensors[0]
