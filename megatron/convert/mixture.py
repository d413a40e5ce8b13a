"""Experts of Mixtral, Qwen2-MoE and Qwen3-MoE in config.json, in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.base.errors import UserError
from megatron.base.option import is_unset
from megatron.base.values import Values
from megatron.config.model import MAX_LAYERS, ModelConfig

MIXTRAL, QWEN2_MOE, QWEN3_MOE = "mixtral", "qwen2_moe", "qwen3_moe"


# Megatron-CC to Hugging Face


def expert_requirements(model: ModelConfig) -> dict[str, dict[str, bool]]:
    """Requirements of each architecture on experts, and whether the model meets them."""
    layers, shared = model.expert_layers, not is_unset(model.moe_shared_expert_intermediate_size)
    capacity, most, k = model.moe_eval_capacity_factor, max(layers.values(), default=0), model.moe_router_topk
    routed = {
        "--num-experts": model.has_experts,
        "the same number of experts in every expert layer": len(set(layers.values())) <= 1,
        "--moe-router-score-function softmax": model.moe_router_score_function == "softmax",
        "no --moe-router-num-groups": is_unset(model.moe_router_num_groups),
        "--moe-router-topk-scaling-factor 1": model.moe_router_topk_scaling_factor == 1.0,
        "no --moe-router-enable-expert-bias": not model.moe_router_enable_expert_bias,
        "no --mlp-type residual": model.mlp_type == "standard",
        f"no --moe-eval-capacity-factor below {most} / {k}, which drops tokens": (
            is_unset(capacity) or capacity * k >= most
        ),
    }
    return {
        MIXTRAL: {
            **routed,
            "experts in all layers": len(layers) == model.num_layers,
            "--moe-router-topk of at least 2": k > 1,
            "no --moe-router-pre-softmax": not model.moe_router_pre_softmax,
            "no --moe-shared-expert-intermediate-size": not shared,
        },
        QWEN2_MOE: {
            **routed,
            "--moe-shared-expert-intermediate-size": shared,
            "--moe-shared-expert-gate": model.moe_shared_expert_gate,
        },
        QWEN3_MOE: {**routed, "no --moe-shared-expert-intermediate-size": not shared},
    }


def mixtral_config(model: ModelConfig) -> dict[str, Any]:
    """Fields of Mixtral's experts."""
    return {
        **_routing_config(model),
        "intermediate_size": model.moe_ffn_hidden_size,
        "num_local_experts": _experts_per_layer(model),
        "router_jitter_noise": model.moe_input_jitter_eps,
    }


def qwen2_moe_config(model: ModelConfig) -> dict[str, Any]:
    """Fields of Qwen2-MoE's experts."""
    return {
        **qwen3_moe_config(model),
        "qkv_bias": model.add_qkv_bias,
        "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
    }


def qwen3_moe_config(model: ModelConfig) -> dict[str, Any]:
    """Fields of Qwen3-MoE's experts."""
    step = _interval(model.expert_layers, model.num_layers)
    return {
        **_routing_config(model),
        "num_experts": _experts_per_layer(model),
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": model.moe_router_topk > 1 and not model.moe_router_pre_softmax,
        "decoder_sparse_step": step or 1,
        "mlp_only_layers": [] if step else sorted(set(range(model.num_layers)) - set(model.expert_layers)),
    }


def _routing_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts_per_tok": model.moe_router_topk,
        "router_aux_loss_coef": model.balance_weight,
    }


def _experts_per_layer(model: ModelConfig) -> int:
    (count,) = set(model.expert_layers.values())
    return count


def _interval(expert_layers: Iterable[int], layers: int) -> int | None:
    """The step such that every step-th layer has experts, and no other layer; None if there is none."""
    numbers = sorted(expert_layers)
    return next((step for step in range(1, layers + 1) if numbers == list(range(step - 1, layers, step))), None)


# Hugging Face to Megatron-CC


def mixtral_experts(config: Values) -> dict[str, object]:
    """Model fields of Mixtral's experts; raises UserError if our models lack a feature."""
    k = config.integer("num_experts_per_tok", 2)
    _check_single_expert(k, normalized=True)
    return {
        **_routing_of(config, k),
        "num_experts": [config.integer("num_local_experts", 8, minimum=2)],
        "moe_input_jitter_eps": config.number("router_jitter_noise", 0.0),
    }


def qwen_experts(config: Values, k: int, experts: int, width: int) -> dict[str, object]:
    """Model fields of Qwen's experts; raises UserError if our models lack a feature.

    Args:
        config: content of config.json.
        k, experts, width: the file's defaults: experts per token, experts per layer, and their inner width.
    """
    k, normalized = config.integer("num_experts_per_tok", k), config.flag("norm_topk_prob", False)
    _check_single_expert(k, normalized)
    layers, step = config.integer("num_hidden_layers", maximum=MAX_LAYERS), config.integer("decoder_sparse_step", 1)
    name = "num_experts" if config.has("num_experts") else "num_local_experts"  # as transformers 5 may write it
    count = config.integer(name, experts, minimum=2)
    dense = set(config.integers("mlp_only_layers")) if config.has("mlp_only_layers") else set()
    expert_layers = [number for number in range(step - 1, layers, step) if number not in dense]
    if not expert_layers:
        raise UserError("decoder_sparse_step and mlp_only_layers leave no layer with experts; it cannot be converted")
    interval = _interval(expert_layers, layers)
    # An interval, or a list of expert counts per layer.
    if interval:
        expert_fields: dict[str, object] = {"num_experts": [count], "expert_interval": interval}
    else:
        expert_fields = {"num_experts": [count if number in expert_layers else 1 for number in range(layers)]}
    return {
        **_routing_of(config, k),
        **expert_fields,
        "moe_ffn_hidden_size": config.integer("moe_intermediate_size", width),
        "moe_router_pre_softmax": not normalized and k > 1,
    }


def qwen2_moe_experts(config: Values) -> dict[str, object]:
    """Model fields of Qwen2-MoE's experts; raises UserError if our models lack a feature."""
    return {
        **qwen_experts(config, 4, 60, 1408),
        "moe_shared_expert_intermediate_size": config.integer("shared_expert_intermediate_size", 5632),
        "moe_shared_expert_gate": True,
    }


def _check_single_expert(k: int, normalized: bool) -> None:
    if k == 1 and normalized:
        raise UserError(
            "num_experts_per_tok 1 with weights that sum to 1 cannot be converted: our models weight a token's only "
            "expert by its probability"
        )


def _routing_of(config: Values, k: int) -> dict[str, object]:
    coefficient = config.number("router_aux_loss_coef", 1e-3, minimum=0)
    return {"moe_router_topk": k, "moe_aux_loss_coeff": [coefficient]}
