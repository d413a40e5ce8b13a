"""Checkpoints of models with experts: a run goes on where it was, on any layout, and begins with a dense model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.load import saved_config
from megatron.config.model import LM_LOSS
from megatron.models.experts import Expert, Experts
from megatron.parallel.data import buffer
from megatron.training.assembly import Engines
from megatron.training.pretrain import main
from megatron.training.replica_check import check_replicas
from megatron.training.saved_run import find_saved
from tests.multiprocess.test_experts import BIASED, DIST, FOLDED, MOE, SP, Changes, _parallel
from tests.support.cli import run_cli
from tests.support.combinations import in_turn, mark_repeats
from tests.support.corpus import tiny_flags, write_documents
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, merge, tiny_checkpoints, tiny_engines, tiny_train
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

HALF = 2
Steps = tuple[list[float], list[float]]


def _steps(trace: Trace) -> Steps:
    return trace.losses, trace.grad_norms


def _stopped(changes: Changes, root: Path) -> tuple[Steps, dict[str, list[float]]]:
    """Trains, saves and goes on: the steps after the save, and the biases of experts at it."""
    engines = tiny_engines(merge(changes, {"checkpoint": {"save": str(root)}}))
    tiny_train(engines, HALF, masked=True)
    tiny_checkpoints(engines, HALF).save()
    biases = _biases(engines)
    return _steps(tiny_train(engines, HALF, masked=True, first=HALF)), biases


def _resumed(engines: Engines) -> None:
    checkpoints = tiny_checkpoints(engines)
    saved = find_saved(checkpoints.config, engines.topology, checkpoints.log)
    assert saved is not None
    checkpoints.load(saved)


def _gone_on(runs: dict[str, Changes], root: Path) -> dict[str, tuple[Steps, dict[str, list[float]]]]:
    results = {}
    for name, changes in runs.items():
        engines = tiny_engines(merge(changes, {"checkpoint": {"load": str(root)}}))
        _resumed(engines)
        check_replicas(engines, HALF)
        biases = _biases(engines)
        results[name] = _steps(tiny_train(engines, HALF, masked=True, first=HALF)), biases
        check_replicas(engines, 2 * HALF)
    return results


def _biases(engines: Engines) -> dict[str, list[float]]:
    return {name: bias.tolist() for stage in engines.stages for name, bias in stage.named_buffers()}


RESUMED_ON: dict[int, dict[str, Changes]] = {
    1: {"one process": {}},
    2: {
        "dp2": _parallel(),
        "dp2 sharded": _parallel(**DIST),
        "tp2": _parallel(tp=2, **SP),
        "pp2": _parallel(pp=2),
        "ep2 sharded": _parallel(ep=2, **DIST),
        "ep2 of tp2": _parallel(tp=2, ep=2, **FOLDED),
    },
    4: {
        "ep4": _parallel(ep=4),
        "ep2 of dp4 sharded": _parallel(ep=2, **DIST),
        "tp2 ep2": _parallel(tp=2, ep=2),
        "ep2 of tp2 dp2 sharded": _parallel(tp=2, ep=2, **FOLDED, **DIST),
        "pp2 ep2 sharded": _parallel(pp=2, ep=2, **DIST),
    },
}


@pytest.mark.parametrize("sharded", mark_repeats([{}, DIST], keep=[DIST]), ids=["whole", "sharded"])
def test_a_run_with_experts_resumes_on_any_layout(sharded: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit at the same layout; to rounding at others. The biases that balance experts come along, and the counts
    of the global batch that is balanced."""
    model = merge(MOE, BIASED, {"model": {"moe_router_load_balancing_type": "global_aux_loss"}})
    same = merge(model, _parallel(ep=2, **sharded))
    ((steps, biases), _) = run_ranks(2, _stopped, same, tmp_path)
    assert len(biases) == 2
    assert all(len(set(bias)) > 1 for bias in biases.values()), "no bias moved: the case tests nothing"
    for world_size, layouts in RESUMED_ON.items():
        turns = in_turn([(name,) for name in layouts], [{}, DIST])
        runs = {name: merge(model, layouts[name]) for name, saved in turns if saved == sharded}
        ranks = run_ranks(world_size, _gone_on, runs | ({"same": same} if world_size == 2 else {}), tmp_path)
        for name in runs:
            loaded: dict[str, list[float]] = {}
            for results in ranks:
                loaded |= results[name][1]
            assert loaded == biases, name
            for figures, other in zip(ranks[0][name][0], steps, strict=True):
                assert figures == pytest.approx(other, rel=1e-10, abs=0), name
        if world_size == 2:
            assert ranks[0]["same"] == (steps, biases)


TP2 = {"tp": 2, **FOLDED}


@pytest.mark.parametrize("folded", mark_repeats([{}, TP2], keep=[TP2]), ids=["of replicas", "of tensor-parallel ranks"])
def test_a_run_with_residuals_resumes_bit_for_bit(folded: dict[str, int], tmp_path: Path) -> None:
    specs = {
        "compression": {"compress": ["dp-grad=powersgd,rank=2", "ep-dispatch=fixpoint,bits=4,rounding=stochastic"]}
    }
    changes = merge(MOE, BIASED, {"precision": {"fp64": False}}, _parallel(ep=2, **DIST, **folded), specs)
    expected = run_ranks(4, _stopped, changes, tmp_path)[0]
    assert run_ranks(4, _gone_on, {"same": changes}, tmp_path)[0]["same"] == expected


def _disturbed(changes: Changes) -> str:
    engines = tiny_engines(changes)
    check_replicas(engines, 0)
    if engines.topology.rank == 1:
        for stage in engines.stages:
            dict(stage.named_buffers())["layers.1.mlp.router.expert_bias"][2] += 1e-3
    with pytest.raises(UserError) as caught:
        check_replicas(engines, 1)
    return str(caught.value)


def test_a_bias_that_differs_is_found() -> None:
    for message in run_ranks(2, _disturbed, merge(MOE, BIASED, _parallel(ep=2))):
        assert "layers.1.mlp.router.expert_bias on rank 0 and rank 1" in message


DENSE: Changes = {
    "precision": {"fp64": True},
    "data": {"eod_mask_loss": True},
    "model": {"hidden_dropout": 0.1, "swiglu": True, "ffn_hidden_size": 48},
}
UPCYCLED: dict[str, Changes] = {
    "top 2": {"model": {"num_experts": [4]}},
    "every other layer, top 3, with biases and z-loss": {
        "model": {
            "num_experts": [4, 8], "expert_interval": 2, "moe_router_topk": 3, "moe_router_enable_expert_bias": True,
            "moe_z_loss_coeff": 1e-3,
        }
    },
    "sigmoid": {"model": {"num_experts": [4], "moe_router_score_function": "sigmoid"}},
    "residual": {"model": {"num_experts": [4], "mlp_type": "residual"}},
}  # fmt: skip
UPCYCLED_ON: dict[int, dict[str, Changes]] = {
    1: {"one process": {}},
    2: {"ep2 sharded": _parallel(ep=2, **DIST), "tp2": _parallel(tp=2, **SP)},
    4: {"tp2 ep2": _parallel(tp=2, ep=2), "pp2 ep2": _parallel(pp=2, ep=2, **DIST)},
}


def _dense(changes: Changes, root: Path) -> float:
    """Trains and saves a dense model; the loss that it would have next."""
    _stopped(changes, root)
    engines = tiny_engines(merge(changes, {"checkpoint": {"load": str(root), "finetune": True}}))
    _resumed(engines)
    return tiny_train(engines, 1, masked=True).named[0][LM_LOSS]


def _first_experts(engines: Engines) -> list[Tensor]:
    """A weight of the experts of this rank's first layer with any."""
    (layer, *_) = (module for stage in engines.stages for module in stage.modules() if isinstance(module, Experts))
    return [expert.dense_4h_to_h.weight for expert in layer.experts.values() if isinstance(expert, Expert)]


def _upcycled_losses(runs: dict[str, Changes], root: Path) -> dict[str, float]:
    """The first losses of models that begin with a dense model's weights."""
    losses = {}
    for name, changes in runs.items():
        upcycled = {"checkpoint": {"load": str(root), "moe_use_upcycling": True}}
        engines = tiny_engines(merge(changes, upcycled))
        _resumed(engines)
        check_replicas(engines, 0)
        first, *copies = _first_experts(engines)
        assert all(torch.equal(first, other) for other in copies)
        losses[name] = tiny_train(engines, 2, masked=True).named[0][LM_LOSS]
        assert not any(torch.equal(first, other) for other in copies), "the router sends all experts the same"
        assert engines.optimizer.steps == 2
    return losses


@pytest.mark.parametrize("saved_on", mark_repeats(["one", "tp2"], keep=["one"]))
def test_experts_begin_with_the_dense_models_loss(saved_on: str, tmp_path: Path) -> None:
    """The first loss is the dense model's to the last bits; then experts learn different things."""
    world, layout = {"one": (1, {}), "tp2": (2, _parallel(tp=2, **SP))}[saved_on]
    loss = run_ranks(world, _dense, merge(DENSE, layout), tmp_path)[0]
    cases = UPCYCLED if saved_on == "one" else {"top 2": UPCYCLED["top 2"]}
    for world_size, layouts in UPCYCLED_ON.items() if saved_on == "one" else [(2, UPCYCLED_ON[2])]:
        runs = {
            f"{case}, {name}": merge(DENSE, extra, changes)
            for case, extra in cases.items()
            for name, changes in layouts.items()
            if case == "top 2" or name == "ep2 sharded"
        }
        for name, first in run_ranks(world_size, _upcycled_losses, runs, tmp_path, timeout=200.0)[0].items():
            assert first == pytest.approx(loss, rel=1e-12, abs=0), name


def _from_halves(runs: dict[str, Changes], root: Path) -> dict[str, tuple[dict[str, list[float]], float]]:
    """Biases of experts, and the next loss, of runs that begin with a checkpoint's weights."""
    results = {}
    for name, changes in runs.items():
        engines = tiny_engines(merge(changes, {"checkpoint": {"load": str(root), "finetune": True}}))
        _resumed(engines)
        results[name] = _biases(engines), tiny_train(engines, 1, masked=True).named[0][LM_LOSS]
    return results


EP2 = _parallel(ep=2, **DIST)


@pytest.mark.parametrize("layout", mark_repeats([{}, EP2], keep=[EP2]), ids=["one", "ep2 sharded"])
def test_fp32_values_come_from_a_run_in_bf16(layout: Changes, tmp_path: Path) -> None:
    """The optimizer's fp32 values, for experts too; and biases of experts, which the optimizer does not hold."""
    halves, world_size = {"precision": {"fp64": False, "bf16": True}}, 2 if layout else 1
    (_, biases), *_ = run_ranks(1, _stopped, merge(MOE, BIASED, halves), tmp_path / "experts")
    run_ranks(1, _stopped, merge(DENSE, halves), tmp_path / "dense")
    same = merge(MOE, BIASED, {"precision": {"fp64": False}}, layout)
    assert any(any(bias) for bias in biases.values())
    assert run_ranks(world_size, _from_halves, {"same": same}, tmp_path / "experts")[0]["same"][0] == biases
    fp32 = {"precision": {"fp64": False}}
    dense = run_ranks(1, _from_halves, {"dense": merge(DENSE, fp32)}, tmp_path / "dense")[0]["dense"][1]
    upcycled = merge(DENSE, fp32, UPCYCLED["top 2"], layout)
    assert run_ranks(world_size, _upcycled_losses, {"begun": upcycled}, tmp_path / "dense")[0][
        "begun"
    ] == pytest.approx(dense, rel=1e-6)


_ROUTED = "--moe-router-topk {}, --moe-router-score-function {}"


def test_the_command_line_begins_with_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's form comes from the dense checkpoint, its experts from the flags; impossible requests are refused
    in a single line."""
    prefix, dense, upcycled = write_documents(tmp_path / "tiny"), tmp_path / "dense", tmp_path / "begun"
    train(1, tiny_flags(prefix, train_iters=2, save=dense, swiglu=True, ffn_hidden_size=24))
    form = {"num_layers": None, "hidden_size": None, "num_attention_heads": None, "use_checkpoint_args": True}
    experts = {"num_experts": 4, "moe_use_upcycling": True, "load": dense}
    done = run_cli(2, ["pretrain_gpt.py", *tiny_flags(prefix, **form, **experts, train_iters=2, save=upcycled)]).check()
    assert "note: --moe-use-upcycling means --finetune: counters, optimizer and schedules start afresh" in done.stdout
    assert "warning" not in done.stdout
    saved = saved_config(upcycled, 2)[0].model
    assert (saved.num_experts, saved.moe_ffn_hidden_size, saved.swiglu) == ([4], 24, True)
    ep2 = {"load": upcycled, "num_layers": None, "hidden_size": None, "num_attention_heads": None}
    train(2, tiny_flags(prefix, **ep2, use_checkpoint_args=True, expert_model_parallel_size=2, train_iters=3))
    shape = {"swiglu": True, "ffn_hidden_size": 24}
    biased = {"moe_router_enable_expert_bias": True}
    for flags, says in (
        ({**experts, "load": upcycled}, "holds a model that has experts already; leave the flag out"),
        ({"num_experts": 8, "load": upcycled}, "; compare --num-experts with its config.yaml"),
        (
            {"num_experts": 4, **biased, "load": upcycled},
            "; compare --moe-router-enable-expert-bias with its config.yaml",
        ),
        ({"num_experts": 4, "load": dense}, "model.layers.0.mlp.experts.0.dense_4h_to_h.bias is not in it"),
        ({"num_experts": 4, "load": dense}, "or --moe-use-upcycling to begin with a dense model's weights"),
    ):
        assert main(tiny_flags(prefix, **shape, **flags)) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
        assert says in line
    other = {"num_experts": 4, "moe_router_topk": 1, "moe_router_score_function": "sigmoid", "load": upcycled}
    assert main(tiny_flags(prefix, **shape, **other, train_iters=3)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert f"{_ROUTED.format(1, 'sigmoid')}; that of --load {upcycled} has {_ROUTED.format(2, 'softmax')}. Its" in line


def _counters(engines: Engines) -> list[dict[str, int]]:
    return [dict(state.counters) for state in engines.compressor_states()]


def _saved_in_backward_order(changes: Changes, root: Path) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Counters of compressors before a save with parameters in another order, and after a load in today's."""

    def backward(members: Sequence[Any]) -> list[Any]:
        shapes = list(dict.fromkeys(member[3].shape for member in members))
        return sorted(members, key=lambda member: (member[3].dim() < 2, shapes.index(member[3].shape)))

    with mock.patch.object(buffer, "_sort_params", backward):
        engines = tiny_engines(merge(changes, {"checkpoint": {"save": str(root)}}))
    tiny_train(engines, HALF, masked=True)
    tiny_checkpoints(engines, HALF).save()
    resumed = tiny_engines(merge(changes, {"checkpoint": {"load": str(root)}}))
    _resumed(resumed)
    return _counters(engines), _counters(resumed)


def test_counters_of_compressors_do_not_depend_on_the_order_of_a_stack(tmp_path: Path) -> None:
    """They are saved by the name of its first parameter, which may differ when they are loaded."""
    changes = merge(MOE, _parallel(), {"compression": {"compress": ["dp-grad=powersgd,rank=2"]}})
    for before, after in run_ranks(2, _saved_in_backward_order, changes, tmp_path):
        assert any(counters for counters in before)
        assert after == before
