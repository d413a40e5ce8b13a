"""The schedule zb-v, with the first and the last stage on the same rank: the same numbers as under other schedules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.checkpoint.manifest import read_manifest
from megatron.compression.api import Codec
from megatron.compression.identity import IdentityCodec
from megatron.distributed.policy import Position
from megatron.parallel.pipeline.channel import Direction, PipelineChannel
from megatron.training.assembly import Engines
from megatron.training.saved_run import find_saved
from megatron.training.step import evaluation_step, take_batches
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, merge, tiny_batches, tiny_checkpoints, tiny_engines, tiny_run, tiny_train

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]
STEPS = 2
DOUBLE: Changes = {
    "precision": {"fp64": True},
    "model": {"attention_dropout": 0.2, "hidden_dropout": 0.3, "seq_length": 12},
    "training": {"global_batch_size": 6},
}
UNTIED: Changes = {
    "model": {
        "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "normalization": "RMSNorm",
        "swiglu": True, "ffn_hidden_size": 48, "num_query_groups": 2, "add_bias_linear": False,
    },
}  # fmt: skip


def _parallel(tp: int = 1, pp: int = 2, **options: Any) -> Changes:
    return {"parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **options}}


V: dict[str, Any] = {"pipeline_schedule": "zb-v"}
DEEP: Changes = {"model": {"num_layers": 8}}
UNIFORM: Changes = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform"}}
SELECTIVE: Changes = {"recompute": {"recompute_granularity": "selective"}}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}

OF_TWO: dict[str, Changes] = {
    "pp2": _parallel(**V),
    "pp2 uniform, an odd number of micro-batches": {**_parallel(**V), **UNIFORM, "training": {"micro_batch_size": 2}},
}
OF_FOUR: dict[str, Changes] = {
    "pp4": merge(_parallel(pp=4, **V), DEEP),
    "tp2 pp2 sp selective": {**_parallel(tp=2, **V, sequence_parallel=True), **SELECTIVE},
    "tp2 pp2 split": _parallel(tp=2, **V, scatter_gather_tensors_in_pipeline=True),
    "pp2 dp2 fused, without an effect": {**_parallel(**V), "compression": {"compress": ["embedding=fused"]}},
    "pp2 dp2 sharded overlap": _parallel(**V, **OVERLAP, use_distributed_optimizer=True),
}


def _train(runs: Mapping[str, Changes]) -> dict[str, Trace]:
    return {name: tiny_run(changes, STEPS, masked=True) for name, changes in runs.items()}


def _agree(world_size: int, base: Changes, layouts: Mapping[str, Changes]) -> None:
    """Compare training on some layouts with a single process, which has one chunk and no messages."""
    deep = {name: DEEP if "pp4" in name else {} for name in layouts}
    references = {
        layers: tiny_run(merge(base, changes), STEPS, masked=True)
        for layers, changes in {str(changes): changes for changes in deep.values()}.items()
    }
    runs = {name: merge(base, changes) for name, changes in layouts.items()}
    for traces in run_ranks(world_size, _train, runs, timeout=300.0):
        for name, trace in traces.items():
            reference = references[str(deep[name])]
            assert trace.losses == pytest.approx(reference.losses, rel=1e-12, abs=0), name
            assert trace.grad_norms == pytest.approx(reference.grad_norms, rel=1e-12, abs=0), name


def test_tied_embeddings_agree_on_four_ranks() -> None:
    _agree(4, DOUBLE, OF_FOUR)


@pytest.mark.repeats
def test_untied_embeddings_agree_on_four_ranks() -> None:
    chosen = ("pp4", "tp2 pp2 sp selective", "pp2 dp2 sharded overlap")
    _agree(4, merge(DOUBLE, UNTIED), {name: OF_FOUR[name] for name in chosen})


@pytest.mark.parametrize("name", mark_repeats(["tied", "untied"], keep=["untied"]))
def test_two_ranks_agree(name: str) -> None:
    _agree(2, merge(DOUBLE, UNTIED if name == "untied" else {}), OF_TWO)


COMPRESSED: Changes = {
    "compression": {"compress": ["pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8,error-feedback=on"]}
}
INTERLEAVED = _parallel(num_layers_per_virtual_pipeline_stage=1)
TURN = 1
"""Boundary inside the second rank."""


def _compare_compressed() -> tuple[Trace, Trace]:
    """Train under zb-v, and interleaved with all boundaries compressed but the one that zb-v does not send over."""
    in_v_form = tiny_run(merge(DOUBLE, COMPRESSED, _parallel(**V)), STEPS)
    pick_codec = PipelineChannel._codec

    def _codec(channel: PipelineChannel, way: Direction, position: Position) -> Codec:
        return IdentityCodec() if position.boundary == TURN else pick_codec(channel, way, position)

    with mock.patch.object(PipelineChannel, "_codec", _codec):
        return in_v_form, tiny_run(merge(DOUBLE, COMPRESSED, INTERLEAVED), STEPS)


def test_codecs_act_on_the_boundaries_that_messages_cross() -> None:
    exact = tiny_run(DOUBLE, 1)
    pairs = run_ranks(2, _compare_compressed)
    for in_v_form, interleaved in pairs:
        assert in_v_form.losses == pytest.approx(interleaved.losses, rel=1e-12, abs=0)
        assert in_v_form.grad_norms == pytest.approx(interleaved.grad_norms, rel=1e-12, abs=0)
        assert abs(in_v_form.losses[0] / exact.losses[0] - 1) > 1e-6, "nothing is compressed"
        for point in ("pp-forward", "pp-backward"):
            assert in_v_form.bytes_by_point[point] < 0.25 * in_v_form.raw_by_point[point]
    for point in ("pp-forward", "pp-backward"):
        sent, reference = (sum(trace.raw_by_point[point] for trace in traces) for traces in zip(*pairs, strict=True))
        assert sent == reference * 2 / 3  # of three boundaries


HALF = 2
RESUMED: dict[str, Changes] = {
    "zb-v": _parallel(**V),
    "1f1b": _parallel(),
    "interleaved": INTERLEAVED,
    "tp2": _parallel(tp=2, pp=1),
}
State = tuple[list[float], list[float], float]
"""Losses and gradient norms of the steps after a checkpoint, and the loss of an evaluation at it."""


def _go_on(engines: Engines) -> State:
    batches = take_batches(tiny_batches(engines.config, engines.topology, masked=True), 3, engines.topology.device)
    sums = torch.tensor(list(evaluation_step(engines, batches).values()), dtype=torch.float64)
    engines.topology.world.all_reduce(sums).wait()
    trace = tiny_train(engines, HALF, masked=True, first=HALF)
    return trace.losses, trace.grad_norms, float(sums[0, 0] / sums[0, 1])


def _stop(changes: Changes, root: Path) -> State:
    engines = tiny_engines(merge(changes, {"checkpoint": {"save": str(root)}}))
    tiny_train(engines, HALF, masked=True)
    tiny_checkpoints(engines, HALF).save()
    return _go_on(engines)


def _resume(changes: Changes, root: Path) -> State:
    engines = tiny_engines(merge(changes, {"checkpoint": {"load": str(root)}}))
    checkpoints = tiny_checkpoints(engines)
    saved = find_saved(checkpoints.config, engines.topology, checkpoints.log)
    assert saved is not None
    checkpoints.load(saved)
    if engines.channel is not None:
        layout = engines.topology.layout
        assert all(layout.crosses(b) for way in (engines.channel.forward, engines.channel.backward) for b in way.sent)
    return _go_on(engines)


def _stop_and_resume(base: Changes, folder: Path) -> dict[str, State]:
    """States of runs that go on, and of those that another layout or the same one resumes."""
    states = {f"{name} goes on": _stop(merge(base, RESUMED[name]), folder / name) for name in ("zb-v", "1f1b")}
    for name, changes in RESUMED.items():
        states[f"{name} resumes zb-v"] = _resume(merge(base, changes), folder / "zb-v")
    states["zb-v resumes 1f1b"] = _resume(merge(base, RESUMED["zb-v"]), folder / "1f1b")
    coded = merge(base, COMPRESSED, RESUMED["zb-v"])
    states["coded zb-v goes on"] = _stop(coded, folder / "coded")
    states["zb-v resumes coded zb-v"] = _resume(coded, folder / "coded")
    return states


def test_checkpoints_do_not_depend_on_the_placement(tmp_path: Path) -> None:
    """A run in V form is resumed exactly; by other layouts, and after them, to rounding."""
    base = merge(DOUBLE, {"data": {"eod_mask_loss": True}})
    (states, others) = run_ranks(2, _stop_and_resume, base, tmp_path, timeout=300.0)
    assert states == others
    assert states["zb-v resumes zb-v"] == states["zb-v goes on"]
    assert states["zb-v resumes coded zb-v"] == states["coded zb-v goes on"]
    assert states["coded zb-v goes on"] != states["zb-v goes on"]
    states |= {f"one process resumes {name}": _resume(base, tmp_path / name) for name in ("zb-v", "1f1b")}
    for name, state in states.items():
        if "coded" not in name:
            for values, expected in zip(state, states["1f1b goes on"], strict=True):
                assert values == pytest.approx(expected, rel=1e-11, abs=0), name
    names = [set(read_manifest(tmp_path / name / f"iter_{HALF:07d}").tensors) for name in ("zb-v", "1f1b")]
    assert names[0] == names[1]
