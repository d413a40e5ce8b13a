"""Checks of mixture-of-experts layers."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.base.option import is_unset
from megatron.config.model import ModelConfig


def check_experts(model: ModelConfig) -> None:
    """Check that the experts can be built; raise UserError otherwise. Derived values must be filled."""
    if not model.has_experts:
        return
    flag = f"--num-experts {' '.join(map(str, model.num_experts))}"
    if model.model_type != "gpt" or not model.predicts_words:
        raise UserError(f"{flag}: only GPT has layers with experts; leave the flag out for {model.type_and_task}")
    if model.expert_interval > 1 and model.moe_layer_freq > 1:
        raise UserError(
            f"--expert-interval {model.expert_interval} and --moe-layer-freq {model.moe_layer_freq} both select "
            "the layers with experts; keep one"
        )
    expert_layers = model.expert_layers
    if not expert_layers:
        raise UserError(
            f"{flag}: --expert-interval {model.expert_interval} leaves none of the {model.num_layers} layers with "
            "experts; lower it"
        )
    interval = max(model.expert_interval, model.moe_layer_freq)
    layers = len(range(model.expert_interval - 1, model.num_layers, interval))
    if len(model.num_experts) not in (1, layers):
        raise UserError(
            f"{flag}: {len(model.num_experts)} numbers for the {layers} layers with experts; give one for all, or "
            f"{layers}"
        )
    fewest = min(expert_layers.values())
    if model.moe_router_topk > fewest:
        raise UserError(
            f"--moe-router-topk {model.moe_router_topk} is above the {fewest} experts of a layer (--num-experts); "
            "lower it, or add experts"
        )
    if model.moe_router_pre_softmax and model.moe_router_score_function != "softmax":
        raise UserError("--moe-router-pre-softmax: the scores are not those of a softmax; leave it out")
    counts = sorted(set(expert_layers.values()))
    groups, chosen, k = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if groups is not None or chosen is not None:
        if groups is None or chosen is None:
            present, missing = "--moe-router-num-groups", "--moe-router-group-topk"
            if groups is None:
                present, missing = missing, present
            raise UserError(f"{present} needs {missing}; give both, or none of them")
        for count in counts:
            if count % groups:
                raise UserError(
                    f"--moe-router-num-groups {groups} does not divide the {count} experts of a layer (--num-experts); "
                    "change one of them"
                )
        if chosen > groups:
            raise UserError(
                f"--moe-router-group-topk {chosen} is above --moe-router-num-groups {groups}; give at most as many"
            )
        if k > chosen * (counts[0] // groups):
            raise UserError(
                f"--moe-router-topk {k} is above the {chosen * (counts[0] // groups)} experts of "
                f"--moe-router-group-topk {chosen} groups; choose more groups, or fewer experts"
            )
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    balancing_flag = f"--moe-router-load-balancing-type {' '.join(kinds)}"
    if len(set(kinds)) < len(kinds) or ("none" in kinds and len(kinds) > 1) or not kinds:
        raise UserError(f"{balancing_flag}: give each loss once, or none alone")
    if len(weights) not in (1, len(kinds)):
        raise UserError(
            f"--moe-aux-loss-coeff {' '.join(f'{weight:g}' for weight in weights)}: {len(weights)} weights for the "
            f"{len(kinds)} losses of {balancing_flag}; give one for all, or {len(kinds)}"
        )
    if model.mlp_type == "residual" and not is_unset(model.moe_shared_expert_intermediate_size):
        raise UserError(
            "--mlp-type residual and --moe-shared-expert-intermediate-size both add an MLP to the experts; keep one"
        )
    if model.moe_shared_expert_gate and is_unset(model.moe_shared_expert_intermediate_size):
        raise UserError(
            "--moe-shared-expert-gate: there is no shared expert; add --moe-shared-expert-intermediate-size"
        )


def check_upcycling(model: ModelConfig) -> None:
    """Check that upcycled experts compute the same as the dense MLP they copy; raise UserError otherwise."""
    flag, width = "--moe-use-upcycling", model.ffn_hidden_size
    if not model.has_experts:
        raise UserError(f"{flag}: no layer has experts; add --num-experts, or leave it out")
    if model.moe_ffn_hidden_size != width:
        raise UserError(
            f"{flag}: an expert is a copy of the whole MLP, of --ffn-hidden-size {width}, and --moe-ffn-hidden-size is "
            f"{model.moe_ffn_hidden_size}; leave that out"
        )
    if not is_unset(model.moe_shared_expert_intermediate_size):
        raise UserError(
            f"{flag}: a shared expert (--moe-shared-expert-intermediate-size) would add to what the dense model "
            "computes; leave it out"
        )
    settings = {
        f"--moe-router-topk {model.moe_router_topk}": model.moe_router_topk == 1,
        "--moe-router-pre-softmax": model.moe_router_pre_softmax,
        f"--moe-router-topk-scaling-factor {model.moe_router_topk_scaling_factor:g}": (
            model.moe_router_topk_scaling_factor != 1.0
        ),
    }
    for setting in (text for text, is_set in settings.items() if is_set):
        raise UserError(
            f"{flag}: with {setting} the weights of a token's experts do not sum to 1, as copies of one MLP must; "
            f"{'give at least 2' if model.moe_router_topk == 1 else 'leave that out'}"
        )
