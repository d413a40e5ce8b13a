"""Mixture of experts: placement in layers, and routing of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.option import Condition, derived, option
from megatron.base.parse_numbers import MAX_SIZE
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
        "Mixture of experts: number of experts in each layer that has experts, as one number for all of them or "
        "one for each (a pyramid). 1 or none: dense layers.",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="shape",
        common="experts",
    )
    expert_interval: int = option(
        1,
        "Give every N-th layer experts: with 2, the second, the fourth, ...",
        unit="layers",
        minimum=1,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_layer_freq: int = option(
        1,
        "Give every N-th layer experts, starting with the first: with 2, the first, the third, ...",
        unit="layers",
        minimum=1,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_ffn_hidden_size: int = derived(
        "--ffn-hidden-size",
        "Inner width of an expert.",
        minimum=1,
        maximum=4 * MAX_SIZE,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_topk: int = option(
        2,
        "Number of experts per token.",
        minimum=1,
        maximum=MAX_SIZE,
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
        "Weight a token's experts by the softmax over all experts, instead of over its own experts only. Always "
        "on with --moe-router-topk 1.",
        checkpoint="shape",
        only_if=(EXPERTS, unless("model.moe_router_topk", 1)),
    )
    moe_router_topk_scaling_factor: float = option(
        1.0,
        "Factor by which the weights of a token's experts are multiplied.",
        above=0,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_num_groups: int | None = derived(
        "a token chooses among all experts",
        "Number of equal groups of experts per layer; each token first chooses --moe-router-group-topk of them.",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_group_topk: int | None = derived(
        "needed by --moe-router-num-groups",
        "Number of groups from which a token chooses its experts: those whose two best experts have the largest "
        "sum of scores.",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "Balance experts by a per-expert bias, which affects only the choice of experts, and grows for experts "
        "that get less than their share.",
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_router_bias_update_rate: float = option(
        1e-3,
        "Step size of --moe-router-enable-expert-bias per iteration.",
        minimum=0,
        only_if=(EXPERTS, needs("model.moe_router_enable_expert_bias")),
    )
    moe_router_load_balancing_type: list[Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]] = option(  # noqa: RUF009
        ["aux_loss"],
        "Loss that balances experts: over the tokens of a micro-batch (aux_loss), of each sequence "
        "(seq_aux_loss), or of the whole previous global batch (global_aux_loss); several of these, or none.",
        only_if=(EXPERTS,),
    )
    moe_aux_loss_coeff: list[float] = option(  # noqa: RUF009
        [1e-2],
        "Weight of the balancing loss; for several losses, one weight for all or one for each.",
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
        "In training, multiply the router's input by random factors that differ from 1 by at most this.",
        minimum=0,
        below=1,
        only_if=(EXPERTS,),
    )
    moe_expert_capacity_factor: float = derived(
        "no token is dropped",
        "Expert capacity factor: tokens of a micro-batch that an expert takes, as a multiple of its equal share; "
        "other tokens skip it.",
        above=0,
        aliases=("moe-train-capacity-factor",),
        only_if=(EXPERTS,),
    )
    moe_eval_capacity_factor: float = derived(
        "--moe-expert-capacity-factor",
        "Expert capacity factor in evaluation and generation.",
        above=0,
        only_if=(EXPERTS,),
    )
    moe_min_capacity: int = option(
        4, "Minimum capacity of an expert.", unit="tokens", minimum=1, only_if=(EXPERTS, _CAPACITY)
    )
    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs",
        "Tokens that an expert drops beyond its capacity: those with the lowest weights (probs), or the last "
        "ones (position).",
        only_if=(EXPERTS, _CAPACITY),
    )
    mlp_type: Literal["standard", "residual"] = option(
        "standard",
        "residual: add an MLP that all tokens go through, mixed with the experts by learned per-token weights "
        "(PR-MoE).",
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_shared_expert_intermediate_size: int = derived(
        "no shared expert",
        "Inner width of a shared expert: an MLP that all tokens go through, in addition to their experts.",
        minimum=1,
        maximum=4 * MAX_SIZE,
        checkpoint="shape",
        only_if=(EXPERTS,),
    )
    moe_shared_expert_gate: bool = option(
        False,
        "Weight the shared expert by a learned per-token gate.",
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
