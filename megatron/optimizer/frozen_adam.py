"""Adam with frozen second moments: the update of 1-bit Adam after its warm-up (Tang et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.optimizer.norm_reducer import ParamNormReducer, stack_scalars
from megatron.parallel.data.param_shards import ParamShard


def steps_taken(inner: torch.optim.Optimizer, shards: Sequence[ParamShard]) -> int:
    """Number of updates so far, which bias corrections depend on."""
    for shard in shards:
        step = inner.state[shard.main].get("step")
        if step is not None:
            return int(step)
    return int(inner.param_groups[0].get("step", 0))


def set_steps_taken(inner: torch.optim.Optimizer, shards: Sequence[ParamShard], count: int) -> None:
    """Restore the number of updates."""
    for group in inner.param_groups:
        if "step" in group:  # apex has one count per group
            group["step"] = count
    for shard in shards:
        state = inner.state[shard.main]
        if "step" in state:
            state["step"] = torch.full_like(state["step"], float(count))


def freeze(inner: torch.optim.Optimizer, shards: Sequence[ParamShard], norms: ParamNormReducer) -> None:
    """Prepare the second moments as divisors from now on.

    Elements without a gradient so far have a second moment of 0, so their momentum would be divided by epsilon alone.
    They take the mean second moment of their whole tensor, including the parts on other ranks.

    Args:
        inner: Adam.
        shards: the shards that this rank updates.
        norms: sums over whole tensors from their shards.
    """
    moments = [inner.state[shard.main]["exp_avg_sq"] for shard in shards]
    sums_n = stack_scalars([moment.sum(dtype=torch.float64) for moment in moments], norms.device)
    for shard, second_moment, total in zip(shards, moments, norms(sums_n.unsqueeze(1)), strict=True):
        mean = total[0] / math.prod(shard.slot.spec.logical_shape)
        second_moment[second_moment == 0] = mean.to(second_moment.dtype)


def step_frozen(inner: torch.optim.Optimizer, shards: Sequence[ParamShard], divisor: float, frozen_at: int) -> None:
    """Take an update by gradients divided by ``divisor``; the second moments are those after ``frozen_at`` updates."""
    count = steps_taken(inner, shards) + 1
    by_main = {id(shard.main): shard for shard in shards}
    for group in inner.param_groups:
        values: dict[str, Any] = group
        beta1, beta2 = values["betas"]
        mains = [p for p in values["params"] if id(p) in by_main]
        states = [inner.state[p] for p in mains]
        moments = [state["exp_avg"] for state in states]
        grads = [by_main[id(p)].grad.to(p.dtype) / divisor for p in mains]
        torch._foreach_lerp_(moments, grads, 1.0 - beta1)
        roots = torch._foreach_sqrt(torch._foreach_div([s["exp_avg_sq"] for s in states], 1.0 - beta2**frozen_at))
        torch._foreach_add_(roots, values["eps"])
        torch._foreach_mul_(mains, 1.0 - values["lr"] * values["weight_decay"])
        torch._foreach_addcdiv_(mains, moments, roots, -values["lr"] / (1.0 - beta1**count))
    set_steps_taken(inner, shards, count)
