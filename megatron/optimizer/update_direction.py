"""The direction of an update: the amount subtracted from the parameters, divided by the learning rate.

It comes from the optimizer's state, not from the change of the parameters: a learning rate of 0, with which a warm-up
begins, changes nothing, and an update with a tiny rate is rounded away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.optimizer.frozen_adam import steps_taken
from megatron.optimizer.muon import Muon
from megatron.parallel.data.param_shards import ParamShard


def begin_directions(inner: torch.optim.Optimizer, shards: Sequence[ParamShard], divisor: float) -> list[Tensor]:
    """Terms of the coming directions that the optimizer's state lacks: weight decay; without momentum, all terms.

    Args:
        inner: Adam with decoupled weight decay, LAMB, SGD, or Muon.
        shards: the shards that it updates; their gradients are still to be divided by ``divisor``.
    """
    groups = _groups(inner)
    if isinstance(inner, Muon):
        inner.directions = {}
    terms = []
    for shard in shards:
        term = shard.main * groups[id(shard.main)]["weight_decay"]
        if not inner.state[shard.main]:
            term.add_(shard.grad.to(term.dtype), alpha=1.0 / divisor)
        terms.append(term)
    return terms


def end_directions(
    inner: torch.optim.Optimizer, shards: Sequence[ParamShard], terms: Sequence[Tensor], frozen_at: int
) -> None:
    """Write the directions of the step that was just taken to the shards' gradients.

    Args:
        inner, shards: the arguments of ``begin_directions``.
        terms: the result of ``begin_directions``.
        frozen_at: the number of updates after which Adam's second moments were frozen; 0 when they were not.
    """
    groups = _groups(inner)
    count = steps_taken(inner, shards)
    for shard, term in zip(shards, terms, strict=True):
        state, group = inner.state[shard.main], groups[id(shard.main)]
        if "exp_avg_sq" in state:
            beta1, beta2 = group["betas"]
            root = (state["exp_avg_sq"] / (1.0 - beta2 ** (frozen_at or count))).sqrt_().add_(group["eps"])
            term.addcdiv_(state["exp_avg"], root, value=1.0 / (1.0 - beta1**count))
            if group["decays"] and "ratio" in state:
                term.mul_(state["ratio"])
        elif isinstance(inner, Muon) and inner.directions is not None:
            term.add_(inner.directions[id(shard.main)])
        elif "momentum_buffer" in state:
            term = state["momentum_buffer"]
        shard.grad.copy_(term)
    if isinstance(inner, Muon):
        inner.directions = None


def _groups(inner: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Hyperparameters of each parameter, by its id."""
    return {id(p): group for group in inner.param_groups for p in group["params"]}
