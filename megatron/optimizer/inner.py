"""The update rule: torch's fused optimizers, apex's if requested, LAMB, or Muon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.lamb import Lamb
from megatron.optimizer.matrix_gather import MatrixGather
from megatron.optimizer.muon import Muon
from megatron.optimizer.norm_reducer import ParamNormReducer
from megatron.parallel.data.param_shards import ParamShard


def make_inner(
    shards: Sequence[ParamShard], config: OptimizerConfig, norms: ParamNormReducer, matrices: MatrixGather
) -> torch.optim.Optimizer:
    """Build the optimizer over the shards' main values, and allocate its state.

    Args:
        shards: the shards that this rank updates.
        config: algorithm and hyper-parameters.
        norms: sums over whole tensors, for LAMB.
        matrices: whole matrices, for Muon.

    Raises:
        UserError: when the name is unknown, or apex is not installed.
    """
    mains_by_kind: dict[tuple[bool, bool, bool], list[torch.Tensor]] = {}
    for shard in shards:
        kind = _orthogonalizes(config, shard), shard.decays, shard.slot.spec.of_vocabulary
        mains_by_kind.setdefault(kind, []).append(shard.main)
    groups: list[dict[str, Any]] = []
    for kind, mains in sorted(mains_by_kind.items(), key=lambda item: item[0], reverse=True):
        is_muon_matrix, decays, of_vocabulary = kind
        group: dict[str, Any] = {"params": mains, "decays": decays, "of_vocabulary": of_vocabulary}
        if is_muon_matrix:
            group["matrices"] = True
        if not decays:
            group["weight_decay"] = 0.0
        groups.append(group)

    betas = (config.adam_beta1, config.adam_beta2)
    inner: torch.optim.Optimizer
    if config.optimizer == "adam" and config.use_apex:
        try:
            from apex.optimizers import FusedAdam
        except ImportError as error:
            raise UserError("--use-apex needs the apex package, which does not import; leave the flag out") from error
        for group in groups:
            group["step"] = 0  # its only count of steps; without this entry, its first step makes it
        inner = FusedAdam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, adam_w_mode=True)
    elif config.optimizer == "adam":
        inner = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
    elif config.optimizer == "sgd":
        inner = torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
    elif config.optimizer == "lamb":
        inner = Lamb(groups, shards, norms, config.lr, (config.lamb_beta1, config.lamb_beta2), config.lamb_eps)
    elif config.optimizer == "muon":
        inner = Muon(groups, shards, matrices, config)
    else:
        raise UserError(f"--optimizer {config.optimizer} is not known; the choices are adam, sgd, lamb and muon")
    for shard in shards:
        state = inner.state[shard.main]
        state.update({name: torch.zeros_like(shard.main) for name in state_names(config, shard)})
        if config.optimizer in ("adam", "lamb", "muon") and "step" not in inner.param_groups[0]:
            # torch's fused Adam counts steps on the device; LAMB computes its bias corrections on the host.
            device = None if config.optimizer == "lamb" else shard.main.device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    return inner


def _orthogonalizes(config: OptimizerConfig, shard: ParamShard) -> bool:
    """Whether the shard is a part of a matrix that Muon orthogonalizes."""
    return config.optimizer == "muon" and bool(shard.slot.spec.blocks)


def state_names(config: OptimizerConfig, shard: ParamShard) -> tuple[str, ...]:
    """Names of the optimizer's state tensors of a shard, which are shaped like their parameters."""
    if _orthogonalizes(config, shard):
        return ("momentum_buffer",)
    if config.optimizer in ("adam", "lamb", "muon"):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum else ()


def set_hyperparameters(
    inner: torch.optim.Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    """Set this step's learning rate, that of input embeddings and the output layer if it differs, and weight decay."""
    for group in inner.param_groups:
        group["lr"] = decoupled_lr if group["of_vocabulary"] and decoupled_lr is not None else lr
        if group["decays"]:
            group["weight_decay"] = weight_decay


def step_inner(inner: torch.optim.Optimizer, shards: Sequence[ParamShard], divisor: float) -> None:
    """Update the main values with the gradients divided by ``divisor``, for loss scale and clipping together.

    torch's fused optimizers divide during the update, without another pass over the gradients.
    """
    for shard in shards:
        shard.main.grad = shard.grad if shard.grad.dtype == shard.main.dtype else shard.grad.to(shard.main.dtype)
    fused: Any = inner
    in_fp64 = shards[0].main.dtype == torch.float64  # the fused optimizers divide by an fp32 number
    if divisor == 1.0:
        inner.step()
    elif getattr(inner, "_step_supports_amp_scaling", False) and not in_fp64:
        device, dtype = shards[0].main.device, torch.float32
        fused.grad_scale = torch.full((), divisor, dtype=dtype, device=device)
        fused.found_inf = torch.zeros((), dtype=dtype, device=device)
        inner.step()
        del fused.grad_scale, fused.found_inf
    else:
        torch._foreach_div_([p.main.grad for p in shards if p.main.grad is not None], divisor)
        inner.step()
    for shard in shards:
        shard.main.grad = None
