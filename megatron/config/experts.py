"""Mixture of experts: placement in layers, and routing of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.option import Condition, derived, option
from megatron.base.parse_numbers import MOST
from megatron.config.conditions import EXPERTS, needs, unless

GLOBAL_LOSS, Z_LOSS = "global_aux_loss", "z"
"""Names of expert losses: the load-balancing loss over a global batch, and the z-loss against large logits."""


_CAPACITY = Condition(
    lambda run, _: run.model.moe_expert_capacity_factor or run.model.moe_eval_capacity_factor, "no token is dropped"
)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Expert fields of the model; ``ModelConfig`` inherits them."""

    num_experts: list[int] = option(  # noqa: RUF009
        [],
        "Mixture of experts: number of experts of each layer that has them, the same for all, or one number a layer (a "
        "pyramid). 1, or none: dense layers.",
        minimum=1,
        maximum=MOST,
        checkpoint="shape",
        common="experts",
    )
    expert_interval: int = option(
        1,
        "Every layer of this interval has experts: with 2 the second, the fourth, ...",
        unit="layers",
        minimum=1,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_layer_freq: int = option(
        1,
        "Every layer of this interval has experts, from the first one: with 2 the first, the third, ...",
        unit="layers",
        minimum=1,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_ffn_hidden_size: int = derived(
        "--ffn-hidden-size",
        "Inner width of an expert.",
        minimum=1,
        maximum=4 * MOST,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_topk: int = option(
        2,
        "Experts that each token goes to.",
        minimum=1,
        maximum=MOST,
        aliases=("topk",),
        checkpoint="shape",
        only_if=(EXPERTS,),
        common="experts",
    )
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = option(
        "softmax",
        "Function that turns the router's logits into scores; sqrtsoftplus is the square root of log(1 + exp(logit)).",
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_pre_softmax: bool = option(
        False,
        "Weigh a token's experts by the softmax over all experts, not over its own alone. Always so with "
        "--moe-router-topk 1.",
        checkpoint="shape",
        only_if=(EXPERTS, unless("model.moe_router_topk", 1)),
    )
    moe_router_topk_scaling_factor: float = option(
        1.0,
        "Factor of the weights of a token's experts.",
        above=0,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_num_groups: int | None = derived(
        "a token chooses among all experts",
        "Groups of a layer's experts, of equal size, of which a token first chooses --moe-router-group-topk.",
        minimum=1,
        maximum=MOST,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_group_topk: int | None = derived(
        "needed by --moe-router-num-groups",
        "Groups among whose experts a token chooses: those whose two best experts have the largest sum of scores.",
        minimum=1,
        maximum=MOST,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "Balance experts by a bias of each, which counts in the choice of experts alone, and grows where they get less "
        "than their share.",
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_bias_update_rate: float = option(
        1e-3,
        "Step of --moe-router-enable-expert-bias in each iteration.",
        minimum=0,
        only_if=(EXPERTS, needs("model.moe_router_enable_expert_bias")),
    )
    moe_router_load_balancing_type: list[Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]] = option(  # noqa: RUF009
        ["aux_loss"],
        "Loss that balances experts: over the tokens of a micro-batch (aux_loss), over those of each sequence "
        "(seq_aux_loss), over those of the whole global batch before (global_aux_loss), several of them, or none.",
        only_if=(EXPERTS,),
    )
    moe_aux_loss_coeff: list[float] = option(  # noqa: RUF009
        [1e-2],
        "Weight of the loss that balances experts; of several, one for all or one each.",
        minimum=0,
        aliases=("moe-loss-coeff",),
        only_if=(EXPERTS, unless("model.moe_router_load_balancing_type", "none")),
    )
    moe_z_loss_coeff: float = option(
        0.0,
        "Weight of the loss that keeps the router's logits small, such as 1e-3.",
        minimum=0,
        only_if=(EXPERTS,),
    )
    moe_input_jitter_eps: float = option(
        0.0,
        "Multiply what the router reads by random numbers within this of 1 in training.",
        minimum=0,
        below=1,
        only_if=(EXPERTS,),
    )
    moe_expert_capacity_factor: float = derived(
        "no token is dropped",
        "Tokens of a micro-batch that an expert takes, over its equal share; the others skip it.",
        above=0,
        aliases=("moe-train-capacity-factor",),
        only_if=(EXPERTS,),
    )
    moe_eval_capacity_factor: float = derived(
        "--moe-expert-capacity-factor",
        "The same in evaluation and generation.",
        above=0,
        only_if=(EXPERTS,),
    )
    moe_min_capacity: int = option(
        4, "Tokens that an expert always takes.", unit="tokens", minimum=1, only_if=(EXPERTS, _CAPACITY)
    )
    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs",
        "Tokens that an expert drops beyond its capacity: those of the lowest weights, or the last ones.",
        only_if=(EXPERTS, _CAPACITY),
    )
    mlp_type: Literal["standard", "residual"] = option(
        "standard",
        "residual: beside the experts an MLP that all tokens go through, mixed with them by learned weights of each "
        "token (PR-MoE).",
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_shared_expert_intermediate_size: int = derived(
        "no shared expert",
        "Inner width of an MLP beside the experts that all tokens go through.",
        minimum=1,
        maximum=4 * MOST,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_shared_expert_gate: bool = option(
        False,
        "Weigh the shared expert by a learned number of each token.",
        checkpoint="shape",
        only_if=(EXPERTS,),
    )

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(count > 1 for count in self.num_experts)

    def expert_layers_of(self, layers: int) -> dict[int, int]:
        """Layer number -> number of experts, for the layers with experts."""
        if not self.has_experts:
            return {}
        interval, first = self.expert_interval, self.expert_interval - 1
        if self.moe_layer_freq > 1:
            interval, first = self.moe_layer_freq, 0
        numbers = range(first, layers, interval)
        counts = self.num_experts * len(numbers) if len(self.num_experts) == 1 else self.num_experts
        return {number: count for number, count in zip(numbers, counts, strict=False) if count > 1}

    @property
    def expert_losses(self) -> dict[str, float]:
        """Auxiliary losses of a layer with experts -> weight in the objective: the load-balancing losses, then the
        z-loss, which keeps logits small."""
        kinds: list[str] = [kind for kind in self.moe_router_load_balancing_type if kind != "none"]
        weights = self.moe_aux_loss_coeff
        balance = dict(zip(kinds, weights * len(kinds) if len(weights) == 1 else weights, strict=False))
        return {**balance, Z_LOSS: self.moe_z_loss_coeff}

    @property
    def balance_weight(self) -> float:
        """Sum of the weights of the load-balancing losses."""
        return sum((weight for kind, weight in self.expert_losses.items() if kind != Z_LOSS), start=0.0)
