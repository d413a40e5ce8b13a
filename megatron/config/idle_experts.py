"""Rules for expert settings without effect."""

from __future__ import annotations

import dataclasses

from megatron.base.option import is_unset
from megatron.config.experts import ExpertsConfig
from megatron.config.idle_rule import Idle, fields_of
from megatron.config.run import RunConfig


def _no_capacity(config: RunConfig, world_size: int) -> bool:
    model = config.model
    return is_unset(model.moe_expert_capacity_factor) and is_unset(model.moe_eval_capacity_factor)


_ALL = [
    field.name
    for field in dataclasses.fields(ExpertsConfig)
    if field.name not in ("num_experts", "moe_shared_expert_gate")
]

EXPERT_RULES = (
    Idle(
        fields_of("model", " ".join(_ALL)),
        lambda config, _: not config.model.has_experts,
        "no layer has experts (--num-experts)",
    ),
    Idle(
        ("model.moe_shared_expert_gate",),
        lambda config, _: not config.model.has_experts,
        "no layer has experts (--num-experts), nor one beside them",
    ),
    Idle(
        ("model.moe_aux_loss_coeff",),
        lambda config, _: config.model.moe_router_load_balancing_type == ["none"],
        "beside --moe-router-load-balancing-type none",
    ),
    Idle(
        ("model.moe_router_bias_update_rate",),
        lambda config, _: not config.model.moe_router_enable_expert_bias,
        "without --moe-router-enable-expert-bias",
    ),
    Idle(
        ("model.moe_router_pre_softmax",),
        lambda config, _: config.model.moe_router_topk == 1,
        "beside --moe-router-topk 1, whose one weight is that of all experts anyway",
    ),
    Idle(
        ("parallel.moe_two_stage",),
        lambda config, _: config.parallel.expert_model_parallel_size == 1,
        "every replica holds all experts (--expert-model-parallel-size)",
    ),
    Idle(
        ("parallel.expert_tensor_parallel_size",),
        lambda config, _: not config.model.has_experts,
        "no layer has experts (--num-experts)",
    ),
    Idle(fields_of("model", "moe_min_capacity moe_token_drop_policy"), _no_capacity, "no token is dropped"),
)
