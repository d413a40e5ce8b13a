"""LAMB: Adam's direction, scaled for each matrix by the norm of its weights (You et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops import finite_norm
from megatron.optimizer.norm_reducer import ParamNormReducer, stack_scalars
from megatron.parallel.data.param_shards import ParamShard


class Lamb(torch.optim.Optimizer):
    """LAMB as apex's FusedLAMB computes it, with norms of whole tensors.

    m and v are Adam's moments of the gradient, and u = m^ / (sqrt(v^) + eps) + decay * w its direction. A matrix moves
    by lr * |w| / |u| * u, or by lr * u if either norm is 0. Biases and norms, which do not decay, move by lr * u.
    FusedLAMB also clips gradients to a global norm of 1; here ``--clip-grad`` does.

    Args:
        groups: parameter groups, each with ``decays``.
        shards: the shards of the groups' main values.
        norms: sums over whole tensors from their shards.
        lr, betas, eps: hyper-parameters.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Sequence[ParamShard],
        norms: ParamNormReducer,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._shards, self._norms = list(shards), norms

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take an update. Directions overwrite the gradients, which saves memory."""
        for group in self.param_groups:
            mains: list[Tensor] = group["params"]
            (beta1, beta2), states = group["betas"], [self.state[p] for p in mains]
            torch._foreach_add_([state["step"] for state in states], 1.0)
            count = int(states[0]["step"])
            grads = [_grad(p) for p in mains]
            first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
            torch._foreach_lerp_(first, grads, 1.0 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
            torch._foreach_copy_(grads, second)
            torch._foreach_div_(grads, 1.0 - beta2**count)
            torch._foreach_sqrt_(grads)
            torch._foreach_add_(grads, group["eps"])
            torch._foreach_reciprocal_(grads)
            torch._foreach_mul_(grads, first)
            torch._foreach_div_(grads, 1.0 - beta1**count)
            torch._foreach_add_(grads, mains, alpha=group["weight_decay"])

        # The trust ratio of a tensor is |w| / |u|, or 1 if either norm is 0.
        device = self._norms.device
        weights = [finite_norm(shard.main)[0] for shard in self._shards]
        directions = [finite_norm(_grad(shard.main))[0] for shard in self._shards]
        sums = self._norms(torch.stack([stack_scalars(weights, device), stack_scalars(directions, device)], dim=1))
        nonzero = (sums > 0).all(dim=1)
        ratios = torch.where(nonzero, (sums[:, 0] / sums[:, 1]).sqrt(), 1.0).unbind()
        for shard, ratio in zip(self._shards, ratios, strict=True):
            self.state[shard.main]["ratio"] = ratio
        for group in self.param_groups:
            mains = group["params"]
            directions = [_grad(p) for p in mains]
            if group["decays"]:
                torch._foreach_mul_(directions, [self.state[p]["ratio"].to(p.dtype) for p in mains])
            torch._foreach_add_(mains, directions, alpha=-group["lr"])


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
