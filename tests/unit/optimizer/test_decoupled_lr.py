"""A learning rate of their own for input embeddings and the output layer, against optimizers with one rate each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.optimizer.loss_scale import ConstantLossScale
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.tensor.shards import ParamSpec

SPECS = {
    "embedding.word_embeddings.weight": ParamSpec((7, 4), of_vocabulary=True),
    "embedding.position_embeddings.weight": ParamSpec((5, 4)),
    "layers.0.mlp.weight": ParamSpec((6, 4), blocks=(6,)),
    "layers.0.mlp.bias": ParamSpec((6,)),
    "output_layer.weight": ParamSpec((7, 4), of_vocabulary=True),
}
DECAY = 0.1
Weights = dict[str, Tensor]


def _drawn(name: str, step: int) -> Tensor:
    seed = 10 * step + list(SPECS).index(name)
    return torch.randn(SPECS[name].logical_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _rates(step: int) -> tuple[float, float]:
    return 1e-2 * (1 + step % 3), 7e-2 / (1 + step)


def _trained(rule: dict[str, Any], lr: int, decoupled: int | None, freeze_at: int | None = None) -> Weights:
    """Weights after 12 steps.

    Args:
        rule: flags of the optimizer.
        lr, decoupled: which of the rates of a step each is.
        freeze_at: step from which Adam's second moments stay as they are.
    """
    params = {name: nn.Parameter(_drawn(name, 99)) for name in SPECS}
    listed = [(name, name, spec, params[name]) for name, spec in SPECS.items()]
    buffer = FlatBuffer(listed, torch.float64, single_process().dp, None)
    config = OptimizerConfig(lr=1.0, clip_grad=0.0, **rule)
    parts: list[Any] = [CompressionPlan({}), Ledger()]
    ours = Optimizer([buffer], single_process(), config, ConstantLossScale(1.0), *parts, sharded=False)
    for step in range(12):
        for slot in (slot for bucket in buffer.buckets for slot in bucket.slots):
            buffer.grads_flat[slot.start : slot.stop].copy_(_drawn(slot.name, step).flatten())
        rates = _rates(step)
        ours.step(
            {"lm loss": (1.0, 1.0)},
            step,
            lr=rates[lr],
            weight_decay=DECAY,
            decoupled_lr=None if decoupled is None else rates[decoupled],
            freeze_variance=freeze_at is not None and step >= freeze_at,
        )
    return {name: param.data for name, param in params.items()}


RULES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "sgd": {"optimizer": "sgd"},
    "lamb": {"optimizer": "lamb"},
    "muon": {"optimizer": "muon"},
    "frozen adam": {"optimizer": "adam"},
}


@pytest.mark.parametrize("name", RULES)
def test_each_parameter_moves_as_in_a_run_at_its_rate(name: str) -> None:
    freeze_at = 5 if name.startswith("frozen") else None
    both = _trained(RULES[name], 0, 1, freeze_at)
    alone = [_trained(RULES[name], lr, None, freeze_at) for lr in (0, 1)]
    for parameter, spec in SPECS.items():
        assert torch.equal(both[parameter], alone[spec.of_vocabulary][parameter])
        assert not torch.allclose(both[parameter], alone[not spec.of_vocabulary][parameter], rtol=1e-3)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_twelve_steps_are_those_of_torch_with_two_groups(name: str) -> None:
    theirs = {parameter: nn.Parameter(_drawn(parameter, 99)) for parameter in SPECS}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in theirs.items() if SPECS[n].of_vocabulary], "weight_decay": DECAY},
        {"params": [p for n, p in theirs.items() if not SPECS[n].of_vocabulary and p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference: torch.optim.Optimizer
    if name == "adam":
        reference = torch.optim.AdamW(groups, foreach=False)
    else:
        reference = torch.optim.SGD(groups, momentum=0.9, foreach=False)
    for step in range(12):
        for parameter, p in theirs.items():
            p.grad = _drawn(parameter, step)
        for number, group in enumerate(reference.param_groups):
            group["lr"] = _rates(step)[number == 0]
        reference.step()
    for parameter, ours in _trained(RULES[name], 0, 1).items():
        torch.testing.assert_close(ours, theirs[parameter].data, rtol=1e-12, atol=1e-12)
