"""A separate learning rate for input embeddings and the output layer, against runs at a single rate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.parallel.tensor.shards import ParamSpec
from tests.support.noise import seeded
from tests.unit.optimizer.support import build_run, torch_groups

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
    return seeded(SPECS[name].logical_shape, 10 * step + list(SPECS).index(name))


def _rates(step: int) -> tuple[float, float]:
    return 1e-2 * (1 + step % 3), 7e-2 / (1 + step)


def _trained(rule: dict[str, Any], lr: int, decoupled: int | None, freeze_at: int | None = None) -> Weights:
    """Weights after 12 steps.

    Args:
        rule: flags of the optimizer.
        lr, decoupled: indices into the rates of a step.
        freeze_at: step from which Adam's second moments are frozen.
    """
    run = build_run({name: _drawn(name, 99) for name in SPECS}, torch.float64, specs=SPECS, **rule)
    for step in range(12):
        run.set_grads(partial(_drawn, step=step))
        rates = _rates(step)
        decoupled_lr = None if decoupled is None else rates[decoupled]
        frozen = freeze_at is not None and step >= freeze_at
        run.step(step, lr=rates[lr], weight_decay=DECAY, decoupled_lr=decoupled_lr, freezes_variance=frozen)
    return {name: param.data for name, param in run.params.items()}


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
    weights = _trained(RULES[name], 0, 1, freeze_at)
    single_rate = [_trained(RULES[name], lr, None, freeze_at) for lr in (0, 1)]
    for parameter, spec in SPECS.items():
        assert torch.equal(weights[parameter], single_rate[spec.of_vocabulary][parameter])
        assert not torch.allclose(weights[parameter], single_rate[not spec.of_vocabulary][parameter], rtol=1e-3)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_twelve_steps_match_torch_with_groups(name: str) -> None:
    theirs = {parameter: nn.Parameter(_drawn(parameter, 99)) for parameter in SPECS}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in theirs.items() if SPECS[n].of_vocabulary], "weight_decay": DECAY},
        *torch_groups({n: p for n, p in theirs.items() if not SPECS[n].of_vocabulary}, DECAY),
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
