"""Consistency checks of the model."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.base.user_text import flag_of
from megatron.config.check_experts import check_experts
from megatron.config.model import ModelConfig
from megatron.config.model_types import PROGRAMS


def check_model(model: ModelConfig) -> None:
    """Check that the model can be built on some layout; raise UserError otherwise."""
    if model.num_attention_heads % model.num_query_groups != 0:
        raise UserError(
            f"--num-query-groups {model.num_query_groups} does not divide --num-attention-heads "
            f"{model.num_attention_heads}; choose a divisor"
        )
    for flag, length in (("--seq-length", model.seq_length), ("--decoder-seq-length", model.labels_of(0))):
        if model.position_embedding_type == "learned_absolute" and length > model.max_position_embeddings:
            raise UserError(
                f"{flag} {length} is longer than --max-position-embeddings {model.max_position_embeddings}; raise the "
                "latter to at least the former"
            )
    pattern = model.window_attn_skip_freq
    pattern_flag = f"--window-attn-skip-freq {' '.join(map(str, pattern))}"
    if pattern and model.sliding_window is None:
        raise UserError(f"{pattern_flag} selects the layers with a window; add --sliding-window")
    if pattern and (len(pattern) != model.num_layers or set(pattern) - {0, 1}):
        raise UserError(
            f"{pattern_flag}: give one number of at least 2, or 0 or 1 for each of the {model.num_layers} layers"
        )
    if pattern and 1 not in pattern:
        raise UserError(f"{pattern_flag} leaves no layer a window; leave out --sliding-window, too")
    _check_rotary(model)
    _check_type(model)
    check_task_head(model)
    check_experts(model)
    if model.add_qkv_bias and model.add_bias_linear:
        raise UserError(
            "--add-qkv-bias: all linear layers have biases already; leave it out, or add --disable-bias-linear"
        )
    activations = [
        flag
        for flag, on in (
            ("--swiglu", model.swiglu),
            ("--geglu", model.geglu),
            ("--openai-gelu", model.openai_gelu),
            ("--squared-relu", model.squared_relu),
        )
        if on
    ]
    if len(activations) > 1:
        raise UserError(f"{' and '.join(activations)} exclude each other; keep one activation")


def _check_type(model: ModelConfig) -> None:
    gpt_flags = {
        "--qk-layernorm": (model.qk_layernorm, "normalizes queries and keys"),
        "--sandwich-norm": (model.sandwich_norm, "normalizes the outputs of attention and the MLP"),
        "--attn-logit-softcapping": (model.attn_logit_softcapping is not None, "bounds attention's scores"),
        "--final-logit-softcapping": (model.final_logit_softcapping is not None, "bounds its logits"),
        "--query-pre-attn-scalar": (model.query_pre_attn_scalar is not None, "divides attention's scores by it"),
        "--apply-embedding-scaling": (model.apply_embedding_scaling, "scales its embeddings"),
    }
    for flag, (is_set, feature) in gpt_flags.items():
        if is_set and model.model_type != "gpt":
            raise UserError(f"{flag}: only GPT {feature}; leave it out for {model.type_and_task}")
    if not model.causal and model.sliding_window is not None:
        kind = model.model_type.upper()
        raise UserError(
            f"--sliding-window limits earlier positions, but {kind} attends to later ones, too; leave it out"
        )
    positions = model.position_embedding_type
    not_of_t5 = {
        f"--position-embedding-type {positions}": positions != "learned_absolute",
        "--untie-embeddings-and-output-weights": model.untie_embeddings_and_output_weights,
        "--parallel-residual": model.parallel_residual,
    }
    for flag, is_set in not_of_t5.items():
        if is_set and model.model_type == "t5":
            raise UserError(
                f"{flag}: T5 has learned positions, one embedding for its inputs and its output, and sequential "
                "layers; leave it out"
            )
    if model.model_type == "deberta":
        other_form = {
            f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type == "rope",
            f"--normalization {model.normalization}": model.normalization != "LayerNorm",
            "--parallel-residual": model.parallel_residual,
            f"--{model.activation}": model.gated,
            "--squared-relu": model.squared_relu,
            "--disable-bias-linear": not model.add_bias_linear,
            f"--num-query-groups {model.num_query_groups}": model.num_query_groups != model.num_attention_heads,
            "--fp32-residual-connection": model.fp32_residual_connection,
        }
        for flag in [flag for flag, is_set in other_form.items() if is_set]:
            raise UserError(
                f"{flag}: DeBERTa has distances or learned positions, and layers with GELU, biases and a LayerNorm "
                "after each part; leave it out"
            )
        if model.conv_kernel_size and model.conv_kernel_size % 2 == 0:
            raise UserError(f"--conv-kernel-size {model.conv_kernel_size}: has no center; give an odd number")
        most = model.max_relative_positions or 0
        if model.position_buckets and not 4 <= model.position_buckets <= 2 * (most - 2):
            raise UserError(
                f"--position-buckets {model.position_buckets}: give 0, or at least 4 and fewer than twice "
                f"--max-relative-positions {most}"
            )
    if model.model_type in ("bert", "deberta") and model.num_tokentypes == 1:
        raise UserError("--num-tokentypes 1: the two sentences of a sample have types 0 and 1; give 0 or at least 2")
    if model.model_type not in ("bert", "deberta") and model.num_tokentypes:
        raise UserError(
            f"--num-tokentypes {model.num_tokentypes}: only BERT's samples have token types; leave it out, or run "
            f"{PROGRAMS['bert']}"
        )


def check_task_head(model: ModelConfig) -> None:
    """Check that the model can have the head of its task; raise UserError otherwise."""
    min_classes = 2 if model.task_head in ("classification", "choice") else 0
    if (min_classes == 0 and model.task_classes) or model.task_classes < min_classes:
        raise UserError(
            f"--task-head {model.task_head} with --task-classes {model.task_classes}: classification and choice take "
            "at least 2, and others none; leave both out, and tasks/main.py --task sets them"
        )
    if model.model_type == "t5" and not model.predicts_words:
        raise UserError("--model-type t5: tasks/main.py fine-tunes encoders and GPT; give --model-type bert")


_SCALING: dict[str, tuple[object, str]] = {
    "rotary_scaling_factor": (8.0, "linear, llama3 or yarn"),
    "rotary_scaling_original_length": (8192, "llama3 or yarn"),
    "rotary_scaling_low_turns": (1.0, "llama3 or yarn"),
    "rotary_scaling_high_turns": (4.0, "llama3 or yarn"),
    "rotary_scaling_attention_factor": (1.0, "yarn"),
    "yarn_correction_range_round_to_int": (True, "yarn"),
}
"""Setting of scaled rotary positions -> default, and the scaling types that use it."""


def _check_rotary(model: ModelConfig) -> None:
    rotary_flags = {
        "--rotary-percent": model.rotary_percent != 1.0,
        "--rotary-scaling": model.rotary_scaling != "none",
        "--rope-local-base-freq": model.rope_local_base_freq is not None,
    }
    for flag in [flag for flag, is_set in rotary_flags.items() if is_set]:
        if model.position_embedding_type != "rope":
            raise UserError(f"{flag} needs rotary positions; add --position-embedding-type rope")
    if model.rope_local_base_freq is not None and model.sliding_window is None:
        raise UserError("--rope-local-base-freq is for layers with a window; add --sliding-window")
    for name, (default, kinds) in _SCALING.items():
        if model.rotary_scaling not in kinds and getattr(model, name) != default:
            flag = name if name != "yarn_correction_range_round_to_int" else f"no_{name}"
            raise UserError(f"{flag_of(flag)} is for --rotary-scaling {kinds}; add it, or leave this out")
    scales_by_turns = model.rotary_scaling not in ("none", "linear")
    if scales_by_turns and model.rotary_scaling_low_turns >= model.rotary_scaling_high_turns:
        raise UserError(
            f"--rotary-scaling-low-turns {model.rotary_scaling_low_turns:g} is not below --rotary-scaling-high-turns "
            f"{model.rotary_scaling_high_turns:g}; lower the former"
        )
    if model.rotary_scaling == "yarn" and model.rotary_base <= 1:
        raise UserError(f"--rotary-base {model.rotary_base:g}: --rotary-scaling yarn needs one above 1; raise it")
    if model.position_embedding_type != "rope":
        return
    if model.rotary_channels < 2 or model.rotary_channels % 2 != 0:
        raise UserError(
            f"--rotary-percent {model.rotary_percent:g} of {model.kv_channels} channels a head "
            f"(--kv-channels) rotates {model.rotary_channels} channels; choose values that give an even number of at "
            "least 2"
        )
