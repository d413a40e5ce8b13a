"""``--delay 1``: every layout takes the steps of a plain loop that applies the gradients of the step before."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel.data.buffer import ParamSlot
from megatron.parallel.data.gradient_sync import ReducedGradients
from megatron.training.assembly import Engines
from megatron.training.replica_check import disagreements
from megatron.training.step import take_batches, train_step
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, merge, tiny_batches, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]

STEPS = 5
MICRO_BATCHES = 4
"""Number of micro-batches in a step, of one sample each."""
RATE_FACTORS = (1.0, 1.5, 0.5, 1.25, 0.75)
"""Factors of learning rate and weight decay: those of a step are applied with the gradients of the step before."""
DELAY: Changes = {"parallel": {"delay": 1}}
DOUBLE: Changes = {"precision": {"fp64": True}}
CLIPS: Changes = {"optimizer": {"clip_grad": 0.5}}
SGD: Changes = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9, "lr": 0.1}}
EXTRAPOLATES: Changes = {**CLIPS, "parallel": {"delay_correction": "extrapolate", "delay_strength": 0.75}}
LOOKS_AHEAD: Changes = {**CLIPS, "parallel": {"delay_correction": "lookahead", "delay_strength": 0.75}}
MUON: Changes = {"optimizer": {"optimizer": "muon"}}
MUON_AHEAD: Changes = {**MUON, "parallel": LOOKS_AHEAD["parallel"]}
LAMB: Changes = {"optimizer": {"optimizer": "lamb", "lr": 0.02}}
SHARDED = {"use_distributed_optimizer": True}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}, "micro 2": {"micro_batch_size": 2}},
    2: {
        "dp2": {},
        "dp2 sharded, small buckets": {**SHARDED, "ddp_bucket_size": 3000},
        "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "pp2 zb-h1": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
        "pp2 without a flush": {"pipeline_model_parallel_size": 2, "no_pipeline_flush": True},
        "pp2 virtual": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    },
    4: {
        "pp2 dp2 sharded": {"pipeline_model_parallel_size": 2, **SHARDED},
        "pp4 eager, without a flush": {
            "pipeline_model_parallel_size": 4,
            "pipeline_schedule": "eager-1f1b",
            "no_pipeline_flush": True,
        },
        "pp2 dp2 sharded, without a flush": {"pipeline_model_parallel_size": 2, "no_pipeline_flush": True, **SHARDED},
        "pp2 tp2, without a flush": {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "no_pipeline_flush": True,
        },
        "tp2 dp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}


def _slots(engines: Engines) -> list[ParamSlot]:
    (buffer,) = engines.buffers
    return [slot for bucket in buffer.buckets for slot in bucket.slots]


def _plain_loop(changes: Changes, steps: int) -> tuple[list[float], list[float]]:
    """Losses, and norms of the applied gradients (NaN without), of a loop in one process over torch's optimizer.

    The engines only differentiate: they take steps of learning rate zero.
    """
    model = {name: changes[name] for name in ("precision", "model")}
    engines = tiny_engines(merge(model, {"optimizer": {"clip_grad": 0.0}}))
    options = merge({"optimizer": {"clip_grad": 1.0}}, changes)["optimizer"]
    (buffer,), slots = engines.buffers, _slots(engines)
    params = [slot.param.detach().clone() for slot in slots]
    decay = engines.config.optimizer.weight_decay
    groups = [{"params": [p], "weight_decay": decay if p.dim() > 1 else 0.0} for p in params]
    if options.get("optimizer") == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=options["lr"], momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=engines.config.optimizer.lr, betas=(0.9, 0.999), eps=1e-8)
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    batches = tiny_batches(engines.config, engines.topology, masked=False)
    correction = changes.get("parallel", {}).get("delay_correction")
    extrapolated, ahead = (0.75 * (correction == name) for name in ("extrapolate", "lookahead"))
    losses, norms, held, before = [], [], list[Tensor](), list[Tensor]()
    for step in range(steps):
        step_batches = take_batches(batches, MICRO_BATCHES, engines.topology.device)
        losses.append(train_step(engines, step_batches, step, lr=0.0, weight_decay=0.0).loss)
        new = [buffer.grads_flat[slot.start : slot.stop].view(slot.param.shape).clone() for slot in slots]
        applied = [g + extrapolated * (g - old) for g, old in zip(held, before or held, strict=True)]
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in applied)) if held else math.nan)
        old_params = [p.clone() for p in params]
        for p, g in zip(params, applied, strict=bool(held)):
            p.grad = g * min(1.0, options["clip_grad"] / (norms[-1] + 1e-6))
        for group, (lr, weight_decay) in zip(optimizer.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = RATE_FACTORS[step] * lr, RATE_FACTORS[step] * weight_decay
        if held:
            optimizer.step()
        for slot, p, old in zip(slots, params, old_params, strict=True):
            slot.param.data.copy_(p + ahead * (p - old))
        before, held = held, new
    return losses, norms


def _loop_of_two(changes: Changes, steps: int) -> tuple[list[float], list[float]]:
    """As ``_plain_loop``, for optimizers that torch does not have: one engine differentiates, and another, without a
    delay, takes its updates with the gradients that it is handed."""
    model = {name: changes[name] for name in ("precision", "model")}
    differentiating = tiny_engines(merge(model, {"optimizer": {"clip_grad": 0.0}}))
    updating = tiny_engines(merge(model, {"optimizer": changes["optimizer"]}))
    (grads,), (params,) = differentiating.buffers, updating.buffers
    held: list[Tensor] = []

    def take_held(items: float) -> ReducedGradients:
        params.grads_flat.copy_(held.pop())
        return ReducedGradients(iteration=0, loss_scale=1.0)

    updating.sync.reduce_gradients = take_held  # type: ignore[method-assign,assignment]
    values = updating.config.optimizer
    ahead = 0.75 if "parallel" in changes else 0.0
    batches = tiny_batches(differentiating.config, differentiating.topology, masked=False)
    losses, norms = [], []
    for step in range(steps):
        step_batches = take_batches(batches, MICRO_BATCHES, differentiating.topology.device)
        losses.append(train_step(differentiating, step_batches, step, lr=0.0, weight_decay=0.0).loss)
        new, old = grads.grads_flat.clone(), [slot.param.detach().clone() for slot in _slots(updating)]
        norms.append(math.nan)
        if held:
            rates = RATE_FACTORS[step] * values.lr, RATE_FACTORS[step] * values.weight_decay
            norm = train_step(updating, step_batches, step, *rates).grad_norm
            assert norm is not None
            norms[-1] = norm
        held.append(new)
        for slot, slot_of_update, before in zip(_slots(differentiating), _slots(updating), old, strict=True):
            after = slot_of_update.param.detach()
            slot.param.data.copy_(after + ahead * (after - before))
    return losses, norms


def _run(changes: Changes, steps: int) -> tuple[Trace, list[str]]:
    engines = tiny_engines(merge(changes, DELAY))
    trace = tiny_train(engines, steps, rate_factors=RATE_FACTORS)
    assert engines.delayed is not None
    engines.delayed.finish_reduction()
    return trace, disagreements(engines)


def _run_layouts(runs: dict[tuple[str, str], Changes], steps: int) -> dict[tuple[str, str], tuple[Trace, list[str]]]:
    return {name: _run(changes, steps) for name, changes in runs.items()}


def _changes(layout: dict[str, Any], *others: Changes) -> Changes:
    micro = {name: size for name, size in layout.items() if name == "micro_batch_size"}
    parallel = {name: value for name, value in layout.items() if name not in micro}
    return merge({"training": micro, "parallel": parallel, "model": {"num_layers": _layers(layout)}}, *others)


def _layers(layout: dict[str, Any]) -> int:
    """Two layers, or four where a layout has as many stages."""
    deep = layout.get("pipeline_model_parallel_size") == 4 or "num_layers_per_virtual_pipeline_stage" in layout
    return 4 if deep else 2


RULES = {"adam": CLIPS, "extrapolated": EXTRAPOLATES, "ahead": LOOKS_AHEAD, "sgd": SGD}
RULES_OF_TWO = {"muon": MUON, "muon ahead": MUON_AHEAD, "lamb": LAMB}


@cache
def _expected(rule: str, layers: int) -> tuple[list[float], list[float]]:
    """Losses and norms of a plain loop."""
    model: Changes = {"model": {"num_layers": layers}}
    if rule in RULES:
        return _plain_loop(merge(DOUBLE, RULES[rule], model), STEPS)
    return _loop_of_two(merge(DOUBLE, RULES_OF_TWO[rule], model), STEPS)


LayoutsOfRules = dict[str, list[str]]


def every_layout(ranks: int, rules: Iterable[str]) -> LayoutsOfRules:
    return {rule: list(LAYOUTS[ranks]) for rule in rules}


# Each rule and each kind of layout, and the rules that keep parameters or whole matrices where a layout splits them.
SOME: dict[int, LayoutsOfRules] = {
    2: {
        "adam": ["dp2", "pp2 without a flush"],
        "extrapolated": ["dp2 sharded, small buckets", "pp2 virtual"],
        "ahead": ["dp2 sharded, small buckets", "tp2 sp", "pp2 without a flush"],
        "sgd": ["dp2", "pp2 zb-h1"],
        "muon": ["dp2 sharded, small buckets", "tp2 sp"],
        "muon ahead": ["pp2 without a flush"],
        "lamb": ["dp2 sharded, small buckets", "tp2 sp"],
    },
    4: {
        "ahead": ["pp2 tp2, without a flush", "pp4 eager, without a flush"],
        "muon": ["pp2 dp2 sharded, without a flush", "tp2 dp2 sp"],
    },
}
CASES = [pytest.param(1, every_layout(1, [*RULES, *RULES_OF_TWO]), id="1")]
for _ranks, _some in SOME.items():
    _others = {rule: [name for name in LAYOUTS[_ranks] if name not in _some[rule]] for rule in _some}
    CASES += [pytest.param(_ranks, _some, id=f"{_ranks}"), pytest.param(_ranks, _others, id=f"{_ranks}, others")]


@pytest.mark.parametrize(("ranks", "layouts"), mark_repeats(CASES, keep=["1", "2", "4"]))
def test_layouts_equal_a_plain_loop(ranks: int, layouts: LayoutsOfRules) -> None:
    cases = {
        (rule, name): _changes(LAYOUTS[ranks][name], DOUBLE, (RULES | RULES_OF_TWO)[rule])
        for rule in layouts
        for name in layouts[rule]
    }
    results = (
        [_run_layouts(cases, STEPS)] if ranks == 1 else run_ranks(ranks, _run_layouts, cases, STEPS, timeout=300.0)
    )
    for result in results:
        for (rule, name), (trace, problems) in result.items():
            losses, norms = _expected(rule, _layers(LAYOUTS[ranks][name]))
            assert losses[1] - losses[-1] > 0.05  # the first two are without an update
            assert trace.losses == pytest.approx(losses, rel=1e-10), (rule, name)
            assert trace.grad_norms == pytest.approx(norms, rel=1e-10, nan_ok=True), (rule, name)
            assert not problems
