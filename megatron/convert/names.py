"""Mapping between Hugging Face's tensors and ours, and their conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.option import is_unset
from megatron.config.model import ModelConfig
from megatron.convert.architectures import architecture_of
from megatron.convert.bert import MEGATRON_BERT
from megatron.convert.deberta import DEBERTA
from megatron.convert.mixture import MIXTRAL

Split = Callable[[Tensor], Sequence[Tensor]]
Join = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Rule:
    """Maps a tensor of ours to its Hugging Face counterparts.

    Args:
        ours: logical name of our tensor.
        shape: logical shape of our tensor.
        theirs: names and shapes of the Hugging Face tensors that hold its elements.
        split: converts ours to theirs: views with the elements of each of their tensors, in order.
        join: converts theirs to ours, in our shape.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[tuple[str, tuple[int, ...]], ...]
    split: Split
    join: Join


def _same(ours: str, theirs: str, *shape: int) -> Rule:
    return Rule(ours, shape, ((theirs, shape),), lambda x: [x], lambda tensors: tensors[0])


def _transposed(ours: str, theirs: str, rows: int, columns: int) -> Rule:
    """Rule of a transposed weight, as GPT-2 stores the weights of its matrix products."""
    return Rule(ours, (rows, columns), ((theirs, (columns, rows)),), lambda x: [x.t()], lambda tensors: tensors[0].t())


@dataclass(frozen=True)
class ExpertNames:
    """Hugging Face names of a layer's experts.

    Args:
        module: module of the layer that holds the experts.
        projections: names of an expert's gate, value and output projections.
    """

    module: str
    projections: tuple[str, str, str]


_GATED = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ExpertNames("block_sparse_moe", ("w1", "w3", "w2"))
QWEN_MOE_NAMES = ExpertNames("mlp", _GATED)


def rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """Rules of all tensors of a model, in the order of the forward pass.

    Raises:
        UserError: when no architecture supports the model.
    """
    kind = architecture_of(model)
    if kind == MEGATRON_BERT:
        yield from bert_rules(model, vocab_size)
    elif kind == DEBERTA:
        yield from deberta_rules(model, vocab_size)
    elif kind == "gpt2":
        yield from gpt2_rules(model, vocab_size)
    elif kind == "gpt_neox":
        yield from gpt_neox_rules(model, vocab_size)
    else:
        yield from llama_rules(model, vocab_size, MIXTRAL_NAMES if kind == MIXTRAL else QWEN_MOE_NAMES)


def gpt2_rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """Rules of GPT2LMHeadModel and GPT2ForSequenceClassification."""
    h, ffn, heads, width = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads, model.kv_channels
    yield _same("embedding.word_embeddings.weight", "transformer.wte.weight", vocab_size, h)
    positions = "embedding.position_embeddings.weight"
    yield _same(positions, "transformer.wpe.weight", model.max_position_embeddings, h)
    for number in range(model.num_layers):
        our_prefix, their_prefix = f"layers.{number}.", f"transformer.h.{number}."
        for kind in ("weight", "bias"):
            yield _same(f"{our_prefix}input_layernorm.{kind}", f"{their_prefix}ln_1.{kind}", h)
        # Theirs: all queries, all keys, all values. Ours: query, key and value of each head.
        yield Rule(
            f"{our_prefix}self_attention.query_key_value.weight",
            (3 * h, h),
            ((f"{their_prefix}attn.c_attn.weight", (h, 3 * h)),),
            lambda x: [x.view(heads, 3, width, h).permute(3, 1, 0, 2)],
            lambda tensors: tensors[0].view(h, 3, heads, width).permute(2, 1, 3, 0).reshape(3 * h, h),
        )
        yield Rule(
            f"{our_prefix}self_attention.query_key_value.bias",
            (3 * h,),
            ((f"{their_prefix}attn.c_attn.bias", (3 * h,)),),
            lambda x: [x.view(heads, 3, width).transpose(0, 1)],
            lambda tensors: tensors[0].view(3, heads, width).transpose(0, 1).reshape(3 * h),
        )
        yield _transposed(f"{our_prefix}self_attention.dense.weight", f"{their_prefix}attn.c_proj.weight", h, h)
        yield _same(f"{our_prefix}self_attention.dense.bias", f"{their_prefix}attn.c_proj.bias", h)
        for kind in ("weight", "bias"):
            yield _same(f"{our_prefix}post_attention_layernorm.{kind}", f"{their_prefix}ln_2.{kind}", h)
        yield _transposed(f"{our_prefix}mlp.dense_h_to_4h.weight", f"{their_prefix}mlp.c_fc.weight", ffn, h)
        yield _same(f"{our_prefix}mlp.dense_h_to_4h.bias", f"{their_prefix}mlp.c_fc.bias", ffn)
        yield _transposed(f"{our_prefix}mlp.dense_4h_to_h.weight", f"{their_prefix}mlp.c_proj.weight", h, ffn)
        yield _same(f"{our_prefix}mlp.dense_4h_to_h.bias", f"{their_prefix}mlp.c_proj.bias", h)
    for kind in ("weight", "bias"):
        yield _same(f"final_layernorm.{kind}", f"transformer.ln_f.{kind}", h)
    if not model.predicts_words:
        yield _same("classification_head.classifier.weight", "score.weight", model.num_outputs, h)
    elif model.untie_embeddings_and_output_weights:
        yield _same("output_layer.weight", "lm_head.weight", vocab_size, h)


def gpt_neox_rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """Rules of GPTNeoXForCausalLM, which orders query, key and value as we do."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "self_attention.query_key_value": ((3 * h, h), (3 * h,)),
        "self_attention.dense": ((h, h), (h,)),
        "mlp.dense_h_to_4h": ((ffn, h), (ffn,)),
        "mlp.dense_4h_to_h": ((h, ffn), (h,)),
        "input_layernorm": ((h,), (h,)),
        "post_attention_layernorm": ((h,), (h,)),
    }
    yield _same("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight", vocab_size, h)
    for number in range(model.num_layers):
        our_prefix = f"layers.{number}."
        for name, (weight, bias) in shapes.items():
            theirs = f"gpt_neox.{our_prefix}{name.replace('self_attention', 'attention')}"
            yield _same(f"{our_prefix}{name}.weight", f"{theirs}.weight", *weight)
            yield _same(f"{our_prefix}{name}.bias", f"{theirs}.bias", *bias)
    for kind in ("weight", "bias"):
        yield _same(f"final_layernorm.{kind}", f"gpt_neox.final_layer_norm.{kind}", h)
    if model.untie_embeddings_and_output_weights:
        yield _same("output_layer.weight", "embed_out.weight", vocab_size, h)


_BEFORE_THE_MLP = {"post_attention_layernorm": "post_attention_layernorm"}
_SANDWICH = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Norms after a layer's attention, and their Hugging Face names, in Llama-like models and in Gemma 2 and 3."""


def llama_rules(model: ModelConfig, vocab_size: int, experts: ExpertNames = QWEN_MOE_NAMES) -> Iterator[Rule]:
    """Rules of Llama-like architectures: the same names, with different biases, with or without experts."""
    h, wide = model.hidden_size, model.num_attention_heads * model.kv_channels
    yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocab_size, h)
    for number in range(model.num_layers):
        our_prefix, their_prefix = f"layers.{number}.", f"model.layers.{number}."
        yield _same(f"{our_prefix}input_layernorm.weight", f"{their_prefix}input_layernorm.weight", h)
        projections = [f"{their_prefix}self_attn.{letter}_proj" for letter in "qkv"]
        yield _by_group(model, our_prefix, projections, "weight", (h,))
        if model.add_bias_linear or model.add_qkv_bias:
            yield _by_group(model, our_prefix, projections, "bias", ())
        for letter in "qk" if model.qk_layernorm else "":
            ours, theirs = f"self_attention.{letter}_layernorm.weight", f"self_attn.{letter}_norm.weight"
            yield _same(f"{our_prefix}{ours}", f"{their_prefix}{theirs}", model.kv_channels)
        yield _same(f"{our_prefix}self_attention.dense.weight", f"{their_prefix}self_attn.o_proj.weight", h, wide)
        if model.add_bias_linear:
            yield _same(f"{our_prefix}self_attention.dense.bias", f"{their_prefix}self_attn.o_proj.bias", h)
        for ours, theirs in (_SANDWICH if model.sandwich_norm else _BEFORE_THE_MLP).items():
            yield _same(f"{our_prefix}{ours}.weight", f"{their_prefix}{theirs}.weight", h)
        if number in model.expert_layers:
            count, their_mlp = model.expert_layers[number], f"{their_prefix}{experts.module}."
            yield _same(f"{our_prefix}mlp.router.weight", f"{their_mlp}gate.weight", count, h)
            for expert in range(count):
                our_expert, their_expert = f"{our_prefix}mlp.experts.{expert}.", f"{their_mlp}experts.{expert}."
                yield from _gated_mlp(model, our_expert, their_expert, experts.projections, model.moe_ffn_hidden_size)
            shared = model.moe_shared_expert_intermediate_size
            if not is_unset(shared):
                yield from _gated_mlp(model, f"{our_prefix}mlp.shared.", f"{their_mlp}shared_expert.", _GATED, shared)
                yield _same(f"{our_prefix}mlp.mixing.weight", f"{their_mlp}shared_expert_gate.weight", 1, h)
        else:
            yield from _gated_mlp(model, f"{our_prefix}mlp.", f"{their_prefix}mlp.", _GATED, model.ffn_hidden_size)
    yield _same("final_layernorm.weight", "model.norm.weight", h)
    if model.untie_embeddings_and_output_weights:
        yield _same("output_layer.weight", "lm_head.weight", vocab_size, h)


def bert_rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """Rules of MegatronBertForPreTraining and MegatronBertForMaskedLM, and of Megatron's BERT for tasks."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    yield _same("embedding.word_embeddings.weight", "bert.embeddings.word_embeddings.weight", vocab_size, h)
    positions, types = "embedding.position_embeddings.weight", "embedding.tokentype_embeddings.weight"
    yield _same(positions, "bert.embeddings.position_embeddings.weight", model.max_position_embeddings, h)
    yield _same(types, "bert.embeddings.token_type_embeddings.weight", model.num_tokentypes, h)
    for number in range(model.num_layers):
        our_prefix, their_prefix = f"layers.{number}.", f"bert.encoder.layer.{number}."
        projections = [f"{their_prefix}attention.self.{projection}" for projection in ("query", "key", "value")]
        for kind, columns in (("weight", (h,)), ("bias", ())):
            yield _same(f"{our_prefix}input_layernorm.{kind}", f"{their_prefix}attention.ln.{kind}", h)
            yield _by_group(model, our_prefix, projections, kind, columns)
            yield _same(
                f"{our_prefix}self_attention.dense.{kind}", f"{their_prefix}attention.output.dense.{kind}", h, *columns
            )
            yield _same(f"{our_prefix}post_attention_layernorm.{kind}", f"{their_prefix}ln.{kind}", h)
            yield _same(
                f"{our_prefix}mlp.dense_h_to_4h.{kind}", f"{their_prefix}intermediate.dense.{kind}", ffn, *columns
            )
            inner = (ffn,) if columns else ()
            yield _same(f"{our_prefix}mlp.dense_4h_to_h.{kind}", f"{their_prefix}output.dense.{kind}", h, *inner)
    for kind, columns in (("weight", (h,)), ("bias", ())):
        yield _same(f"final_layernorm.{kind}", f"bert.encoder.ln.{kind}", h)
        if not model.predicts_words:
            yield _same(f"classification_head.pooler.{kind}", f"bert.pooler.dense.{kind}", h, *columns)
            yield _same(f"classification_head.classifier.{kind}", f"classifier.{kind}", model.num_outputs, *columns)
            continue
        yield _same(f"lm_head.dense.{kind}", f"cls.predictions.transform.dense.{kind}", h, *columns)
        yield _same(f"lm_head.layernorm.{kind}", f"cls.predictions.transform.LayerNorm.{kind}", h)
        if model.bert_binary_head:
            yield _same(f"binary_head.pooler.{kind}", f"bert.pooler.dense.{kind}", h, *columns)
            yield _same(f"binary_head.order.{kind}", f"cls.seq_relationship.{kind}", 2, *columns)
    if model.predicts_words:
        yield _same("lm_head.bias", "cls.predictions.bias", vocab_size)


def deberta_rules(model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
    """Rules of DebertaV2Model and DebertaV2ForSequenceClassification."""
    h, ffn, body = model.hidden_size, model.ffn_hidden_size, "deberta."
    embedding, encoder = f"{body}embeddings.", f"{body}encoder."
    yield _same("embedding.word_embeddings.weight", f"{embedding}word_embeddings.weight", vocab_size, h)
    if model.position_embedding_type == "learned_absolute":
        positions = "embedding.position_embeddings.weight"
        yield _same(positions, f"{embedding}position_embeddings.weight", model.max_position_embeddings, h)
    if model.num_tokentypes:
        types = "embedding.tokentype_embeddings.weight"
        yield _same(types, f"{embedding}token_type_embeddings.weight", model.num_tokentypes, h)
    for kind in ("weight", "bias"):
        yield _same(f"embedding.layernorm.{kind}", f"{embedding}LayerNorm.{kind}", h)
    for number in range(model.num_layers):
        our_prefix, their_prefix = f"layers.{number}.", f"{encoder}layer.{number}."
        projections = [f"{their_prefix}attention.self.{projection}_proj" for projection in ("query", "key", "value")]
        for kind, columns in (("weight", (h,)), ("bias", ())):
            yield _by_group(model, our_prefix, projections, kind, columns)
            yield _same(
                f"{our_prefix}self_attention.dense.{kind}", f"{their_prefix}attention.output.dense.{kind}", h, *columns
            )
            yield _same(
                f"{our_prefix}post_attention_layernorm.{kind}", f"{their_prefix}attention.output.LayerNorm.{kind}", h
            )
            yield _same(
                f"{our_prefix}mlp.dense_h_to_4h.{kind}", f"{their_prefix}intermediate.dense.{kind}", ffn, *columns
            )
            inner = (ffn,) if columns else ()
            yield _same(f"{our_prefix}mlp.dense_4h_to_h.{kind}", f"{their_prefix}output.dense.{kind}", h, *inner)
            yield _same(f"{our_prefix}output_layernorm.{kind}", f"{their_prefix}output.LayerNorm.{kind}", h)
    if model.conv_kernel_size:
        our_prefix, their_prefix = "layers.0.convolution.", f"{encoder}conv."
        yield _same(f"{our_prefix}weight", f"{their_prefix}conv.weight", h, h, model.conv_kernel_size)
        yield _same(f"{our_prefix}bias", f"{their_prefix}conv.bias", h)
        for kind in ("weight", "bias"):
            yield _same(f"{our_prefix}layernorm.{kind}", f"{their_prefix}LayerNorm.{kind}", h)
    yield _same("relative_positions.weight", f"{encoder}rel_embeddings.weight", 2 * model.relative_span, h)
    for kind, columns in (("weight", (h,)), ("bias", ())):
        yield _same(f"relative_positions.layernorm.{kind}", f"{encoder}LayerNorm.{kind}", h)
        if model.task_head != "none":
            yield _same(f"classification_head.pooler.{kind}", f"pooler.dense.{kind}", h, *columns)
            yield _same(f"classification_head.classifier.{kind}", f"classifier.{kind}", model.num_outputs, *columns)


def _by_group(model: ModelConfig, our_prefix: str, theirs: Sequence[str], kind: str, columns: tuple[int, ...]) -> Rule:
    """Rule of a fused projection, which holds the queries, key and value of each group together."""
    groups, width = model.num_query_groups, model.kv_channels
    sizes = (model.num_attention_heads // groups * width, width, width)
    return Rule(
        f"{our_prefix}self_attention.query_key_value.{kind}",
        (groups * sum(sizes), *columns),
        tuple((f"{projection}.{kind}", (groups * s, *columns)) for projection, s in zip(theirs, sizes, strict=True)),
        lambda x: x.view(groups, sum(sizes), *columns).split(sizes, dim=1),
        lambda tensors: torch.cat([tensor.view(groups, -1, *columns) for tensor in tensors], dim=1).flatten(0, 1),
    )


def _gated_mlp(model: ModelConfig, ours: str, theirs: str, projections: Sequence[str], width: int) -> Iterator[Rule]:
    """Rules of a gated MLP, whose gate and value projections we stack.

    Args:
        model: the model.
        ours, theirs: prefixes of the MLP's names.
        projections: Hugging Face names of the gate, value and output projections.
        width: inner width of the MLP.
    """
    *gate_and_value, output = (f"{theirs}{projection}" for projection in projections)
    h = model.hidden_size
    for kind, columns in (("weight", (h,)), ("bias", ())) if model.add_bias_linear else (("weight", (h,)),):
        shape = (width, *columns)
        yield Rule(
            f"{ours}dense_h_to_4h.{kind}",
            (2, *shape),
            tuple((f"{projection}.{kind}", shape) for projection in gate_and_value),
            lambda x: x.unbind(0),
            lambda pair: torch.stack(list(pair)),
        )
        inner = (width,) if columns else ()
        yield _same(f"{ours}dense_4h_to_h.{kind}", f"{output}.{kind}", h, *inner)
