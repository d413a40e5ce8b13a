"""An optimizer of a few parameters in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import LM_LOSS
from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.optimizer.loss_scale import ConstantLossScale, LossScale
from megatron.optimizer.optimizer import Optimizer, StepTotals
from megatron.optimizer.step_summary import StepSummary
from megatron.parallel.data.buffer import FlatBuffer, NamedParam
from megatron.parallel.data.gradient_sync import ReducedGradients
from megatron.parallel.tensor.shards import ParamSpec


@dataclass
class Run:
    """An optimizer, its parameters and their gradients."""

    optimizer: Optimizer
    params: dict[str, nn.Parameter]
    buffer: FlatBuffer

    def set_grads(self, gradient: Callable[[str], Tensor], factor: float = 1.0) -> None:
        self.buffer.grads_flat.zero_()
        for name, grad in self.grads().items():
            grad.copy_(gradient(name) * factor)

    def grads(self) -> dict[str, Tensor]:
        """Views of the gradients, or of the published update."""
        slots = [slot for bucket in self.buffer.buckets for slot in bucket.slots]
        return {slot.name: self.buffer.grads_flat[slot.start : slot.stop].view(slot.param.shape) for slot in slots}

    def step(
        self,
        step: int = 0,
        losses: tuple[float, float] = (1.0, 1.0),
        *,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        **gradients: bool,
    ) -> StepTotals:
        """Take a step; ``gradients``: properties of the reduced gradients."""
        reduced = ReducedGradients(step, self.optimizer.loss_scale.scale, **gradients)
        summary = self.optimizer.summarize(StepSummary({LM_LOSS: losses}), reduced)
        return self.optimizer.step(summary, reduced, lr, weight_decay, decoupled_lr)


def build_run(
    values: Mapping[str, Tensor],
    grad_dtype: torch.dtype,
    scale: float | LossScale = 1.0,
    specs: Mapping[str, ParamSpec] | None = None,
    **config: Any,
) -> Run:
    """A run with these initial values; ``config``: flags of the optimizer."""
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    specs = specs or {name: ParamSpec(tuple(value.shape)) for name, value in values.items()}
    buffer = FlatBuffer(
        [NamedParam(name, name, specs[name], param) for name, param in params.items()],
        grad_dtype,
        single_process().dp,
        None,
    )
    settings = OptimizerConfig(**{"lr": 1.0, "clip_grad": 0.0, **config})
    scale = ConstantLossScale(scale) if isinstance(scale, float) else scale
    shared: list[Any] = [CompressionPlan({}), Ledger()]
    optimizer = Optimizer(
        [buffer], single_process(), settings, scale, *shared, sharded=False, log_params_norm=True, log_num_zeros=True
    )
    return Run(optimizer, params, buffer)


def torch_groups(params: Mapping[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Parameter groups for torch's optimizers: biases do not decay."""
    return [
        {"params": [param for param in params.values() if param.dim() > 1], "weight_decay": decay},
        {"params": [param for param in params.values() if param.dim() == 1], "weight_decay": 0.0},
    ]
