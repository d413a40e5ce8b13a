"""Compressors in training runs: lossless ones change nothing, and every rank keeps agreeing."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.edgc import RankByEntropy, RankController
from megatron.compression.points import Point
from megatron.config.model import LM_LOSS
from megatron.parallel.data.buffer import ParamSlot
from megatron.parallel.data.gradient_sync import local_share
from megatron.training.assembly import Engines
from megatron.training.coverage import coverage_notes
from megatron.training.replica_check import disagreements
from megatron.training.step import evaluation_step, take_batches
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.documented import python_blocks
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, tiny_batches, tiny_engines, tiny_run, tiny_train
from tests.support.train import train

Changes = dict[str, dict[str, Any]]


def _run(*specs: str, tp: int = 1, pp: int = 1, precision: str = "fp32", order: str = "lazy", **more: Any) -> Changes:
    return {
        "data": {"sample_order": order},
        "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more},
        "compression": {"compress": list(specs)},
        "precision": {} if precision == "fp32" else {precision: True, "initial_loss_scale": 2.0**16},
    }


VIRTUAL: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": 1}
FIXED: dict[str, Any] = {"order": "fixed"}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
FULL_RANK = "rank=32,min-ratio=0"

LOSSLESS: dict[str, tuple[int, Changes]] = {
    "identity": (4, _run("dp-grad=identity", "pp-forward=none", "pp-backward=identity", pp=2)),
    "central parameter server": (4, _run("dp-grad=parameter-server,server=central", tp=2, **OVERLAP)),
    "sharded parameter servers": (4, _run("dp-grad=parameter-server", pp=2)),
    "sharded parameter servers and optimizer": (
        2,
        _run("dp-grad=parameter-server", use_distributed_optimizer=True, **OVERLAP),
    ),
    "powersgd, full rank": (4, _run(f"dp-grad=powersgd,{FULL_RANK}", tp=2)),
    "powersgd, full rank, aggregate residual": (2, _run(f"dp-grad=powersgd,{FULL_RANK},error-feedback=aggregate")),
    "powersgd of a rank that does not pay": (2, _run("dp-grad=powersgd,rank=32")),
    "low rank that does not pay, both ways": (
        2,
        _run("pp-forward=lowrank,rank=32", "pp-backward=lowrank,rank=32,error-feedback=lazy", pp=2),
    ),
    "low rank that does not pay, means fed back": (
        2,
        _run("pp-backward=lowrank,rank=32,error-feedback=lazy-mean", pp=2),
    ),
    "delta, first visits as they are": (2, _run("pp-forward=delta,first-bits=32", pp=2, order="fixed")),
    "powersgd, full rank, overlapped": (2, _run(f"dp-grad=powersgd,{FULL_RANK}", **OVERLAP)),
    "powersgd, full rank, sharded": (2, _run(f"dp-grad=powersgd,{FULL_RANK}", use_distributed_optimizer=True)),
    "stable top-k, density 1": (4, _run("dp-grad=stable-topk,density=1,interval=3", pp=2)),
    "stable top-k, density 1, sharded": (
        2,
        _run("dp-grad=stable-topk,density=1,interval=3", use_distributed_optimizer=True, **OVERLAP),
    ),
    "stable top-k, always dense": (2, _run("dp-grad=stable-topk,density=0.1,interval=1")),
    "top-k, density 1": (2, _run("dp-grad=topk,density=1")),
    "chunked top-k, all of each chunk": (2, _run("dp-grad=chunked-topk,chunk=100,k=100,bits=32")),
    "fused embedding": (4, _run("embedding=fused", pp=2)),
    "fused embedding, tensor-parallel": (8, _run("embedding=fused", pp=2, tp=2)),
    "fused embedding, one stage": (2, _run("embedding=fused")),
    "fused embedding, virtual": (4, _run("embedding=fused", pp=2, **VIRTUAL)),
    "fused embedding and powersgd": (4, _run("embedding=fused", f"dp-grad=powersgd,{FULL_RANK}", pp=2)),
    "embedding powersgd, full rank, fused": (4, _run(f"embedding=powersgd,{FULL_RANK},fused=on", pp=2)),
    "tensor powersgd, full rank": (
        2,
        _run(f"tp-forward=powersgd,{FULL_RANK}", f"tp-backward=powersgd,{FULL_RANK}", tp=2),
    ),
    "embedding stable top-k, density 1": (8, _run("embedding=stable-topk,density=1,interval=3", pp=2, tp=2)),
    "embedding powersgd, full rank": (4, _run(f"embedding=powersgd,{FULL_RANK}", pp=2, tp=2)),
}


def _shallow(changes: Changes) -> Changes:
    """Two layers in place of four, where neither stages nor buckets of small groups of parameters need more."""
    parallel = changes["parallel"]
    needs_more = parallel["pipeline_model_parallel_size"] > 2 or {*VIRTUAL, *OVERLAP} & parallel.keys()
    return changes if needs_more else {**changes, "model": {"num_layers": 2}}


@cache
def _dense(layers: int = 4) -> Trace:
    return tiny_run({"model": {"num_layers": layers}, "precision": {"fp64": True}}, 6)


@pytest.fixture
def dense() -> Trace:
    return _dense()


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_settings_give_the_dense_run(name: str) -> None:
    ranks, changes = LOSSLESS[name][0], _shallow(LOSSLESS[name][1])
    dense = _dense(changes.get("model", {}).get("num_layers", 4))
    for trace in run_ranks(ranks, tiny_run, {**changes, "precision": {"fp64": True}}, 6):
        assert trace.losses == pytest.approx(dense.losses, rel=1e-10)
        assert trace.grad_norms == pytest.approx(dense.grad_norms, rel=1e-10)


LOSSY: dict[str, tuple[int, Changes]] = {
    "powersgd": (4, _run("dp-grad=powersgd,rank=2", pp=2)),
    "powersgd bf16 overlapped": (4, _run("dp-grad=powersgd,rank=2", tp=2, precision="bf16", **OVERLAP)),
    "powersgd fp16 sharded": (2, _run("dp-grad=powersgd,rank=2", precision="fp16", use_distributed_optimizer=True)),
    "powersgd, factors of 4 bits": (4, _run("dp-grad=powersgd,rank=2,factors=fixpoint4", pp=2)),
    "powersgd, factors of 8 bits, sharded bf16": (
        4,
        _run(
            "dp-grad=powersgd,rank=2,factors=fixpoint8,error-feedback=aggregate",
            tp=2,
            precision="bf16",
            use_distributed_optimizer=True,
            **OVERLAP,
        ),
    ),
    "tensor powersgd, bf16 factors": (
        2,
        _run("tp-forward=powersgd,rank=12,factors=bf16", "tp-backward=powersgd,rank=12,factors=bf16", tp=2),
    ),
    "powersgd without state": (2, _run("dp-grad=powersgd,rank=2,warm-start=off,error-feedback=off")),
    "stable top-k": (4, _run("dp-grad=stable-topk,density=0.3,interval=4", pp=2)),
    "stable top-k with neighbors, overlapped bf16": (
        4,
        _run("dp-grad=stable-topk,density=0.05,interval=4,range=3,flush=rotate", tp=2, precision="bf16", **OVERLAP),
    ),
    "stable top-k sharded fp16": (
        4,
        _run("dp-grad=stable-topk,density=0.3,interval=4", precision="fp16", use_distributed_optimizer=True, tp=2),
    ),
    "embedding stable top-k": (
        4,
        _run("embedding=stable-topk,density=0.2,interval=4", "dp-grad=stable-topk,density=0.3,interval=6", pp=2),
    ),
    "embedding top-k fused, fp16": (4, _run("embedding=topk,density=0.2,fused=on", pp=2, precision="fp16")),
    "top-k": (2, _run("dp-grad=topk,density=1~0.2@5")),
    "chunked top-k sharded bf16": (
        4,
        _run("dp-grad=chunked-topk,chunk=32,k=8~4@6", precision="bf16", use_distributed_optimizer=True, tp=2),
    ),
    "chunked top-k over senders, fading": (
        4,
        _run(
            "dp-grad=chunked-topk,chunk=64,k=8,bits=4,merge=senders,feedback-decay=0.95",
            "embedding=chunked-topk,chunk=256",
            pp=2,
        ),
    ),
    "fixpoint gradients": (4, _run("dp-grad=fixpoint,bits=4,error-feedback=on", pp=2, precision="bf16")),
    "stochastic gradients on tensor-parallel ranks": (4, _run("dp-grad=fixpoint,bits=4,rounding=stochastic", tp=2)),
    "stochastic gradients": (4, _run("dp-grad=fixpoint,bits=4,rounding=stochastic")),
    "quantized adam": (4, _run("dp-grad=quantized-adam,bits=6,warmup=8", pp=2)),
    "quantized adam, bf16 sharded": (
        4,
        _run("dp-grad=quantized-adam,bits=8,warmup=8", tp=2, precision="bf16", use_distributed_optimizer=True),
    ),
    "quantized adam, fp16 fused embedding": (
        4,
        _run("dp-grad=quantized-adam,bits=8,warmup=8", "embedding=fused", pp=2, precision="fp16"),
    ),
    "fixpoint pipeline": (4, _run("pp-forward=fixpoint,bits=8", "pp-backward=fixpoint,bits=8", pp=2, tp=2)),
    "fixpoint of tiles": (
        4,
        _run(
            "pp-forward=fixpoint,bits=4.5,group=16,grid=minmax,rotation=16,rotate-when=outlier,rounding=stochastic",
            "pp-backward=fixpoint,bits=5.5,group=8,scale-dtype=bf16",
            "dp-grad=fixpoint,bits=3.8,rotation=32,error-feedback=on",
            "param-gather=fixpoint,bits=6.2,grid=minmax",
            pp=2,
            use_distributed_optimizer=True,
        ),
    ),
    "fixpoint pipeline bf16 virtual": (
        2,
        _run("pp-forward=fixpoint,bits=3", "pp-backward=fixpoint,bits=5", pp=2, precision="bf16", **VIRTUAL),
    ),
    "fixpoint tensor": (4, _run("tp-forward=fixpoint,bits=8", "tp-backward=fixpoint,bits=8", tp=2)),
    "tensor powersgd, recomputed": (
        2,
        {
            **_run("tp-forward=powersgd,rank=12", "tp-backward=powersgd,rank=12", tp=2, precision="bf16"),
            "recompute": {"recompute_granularity": "full", "recompute_method": "uniform"},
        },
    ),
    "fixpoint tensor stochastic": (2, _run("tp-forward=fixpoint,bits=6,rounding=stochastic", tp=2)),
    "fixpoint sequence": (2, _run("tp-forward=fixpoint", "tp-backward=fixpoint", tp=2, sequence_parallel=True)),
    "parameters": (4, _run("param-gather=fixpoint,bits=8", pp=2, use_distributed_optimizer=True)),
    "parameters bf16 stochastic, gradients too": (
        4,
        _run(
            "param-gather=fixpoint,bits=4,rounding=stochastic,warmup=4",
            "dp-grad=powersgd,rank=2",
            tp=2,
            precision="bf16",
            use_distributed_optimizer=True,
        ),
    ),
    "parameters bf16 in 4 bits, long groups": (
        4,
        _run("param-gather=fixpoint,bits=4,group=2048", tp=2, precision="bf16", use_distributed_optimizer=True),
    ),
    "parameters stochastic, stages of different numbers of buckets": (
        4,
        _run(
            "param-gather=fixpoint,bits=4,rounding=stochastic",
            pp=2,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            ddp_bucket_size=4350,
        ),
    ),
    "parameters and gradients in 8-bit floats": (
        4,
        _run(
            "param-gather=float8",
            "dp-grad=float8,format=e5m2,error-feedback=on",
            pp=2,
            precision="fp16",
            use_distributed_optimizer=True,
            **OVERLAP,
        ),
    ),
    "gradients in 8-bit floats": (
        4,
        _run("dp-grad=float8,rounding=stochastic", "embedding=float8,format=e5m2", pp=2, precision="bf16"),
    ),
    "activations in 8-bit floats": (
        4,
        _run(
            "pp-forward=float8,scale=row",
            "pp-backward=float8,format=e5m2,rounding=stochastic",
            "tp-forward=float8,scale=row",
            "tp-backward=float8,tile=32,scale-dtype=e8m0",
            tp=2,
            pp=2,
            sequence_parallel=True,
        ),
    ),
    "8-bit floats on tensor-parallel ranks": (4, _run("tp-forward=float8", "tp-backward=float8,scale=tensor", tp=2)),
    "delta": (2, _run("pp-forward=delta,bits=2", "pp-backward=fixpoint,bits=4", pp=2, **FIXED)),
    "delta lowbits, evicting": (4, _run("pp-forward=delta-lowbits,bits=4,cache=5,memory=2", pp=2, **FIXED)),
    "delta bf16 virtual stochastic": (
        2,
        _run("pp-forward=delta,bits=3,rounding=stochastic", pp=2, precision="bf16", **VIRTUAL, **FIXED),
    ),
    "delta fp16 four stages gpipe": (
        4,
        _run("pp-forward=delta,bits=3", pp=4, precision="fp16", pipeline_schedule="gpipe", **FIXED),
    ),
    "delta by token": (2, _run("pp-forward=delta,bits=2,predict=token", pp=2)),
    "delta by token, middle stages, eager, eval": (
        4,
        _run("pp-forward=delta,bits=3,predict=token,eval=on", pp=4, pipeline_schedule="eager-1f1b"),
    ),
    "delta by token, sequence parallel, virtual stages": (
        4,
        _run("pp-forward=delta,bits=3,predict=token", pp=2, tp=2, sequence_parallel=True, precision="bf16", **VIRTUAL),
    ),
    "schedules": (
        4,
        _run(
            "dp-grad=powersgd,rank=24@0/2@5/3@9",
            "pp-forward=fixpoint,bits=8@0/4@6",
            "pp-backward=lowrank,rank=8~2@12,warmup=3,error-feedback=lazy",
            pp=2,
        ),
    ),
    "edgc": (
        8,
        _run("dp-grad=edgc,rank=8,min-rank=2,window=4,sample-every=2,stage-slack=0.5", pp=2, tp=2, precision="fp16"),
    ),
    "edgc by formula, sharded": (
        2,
        _run("dp-grad=edgc,rank=8,window=4,sample-every=1,rule=formula", use_distributed_optimizer=True, **OVERLAP),
    ),
    "lowrank": (2, _run("pp-backward=lowrank,rank=2,error-feedback=lazy", pp=2)),
    "lowrank, factors of 4 bits": (2, _run("pp-backward=lowrank,rank=2,factors=fixpoint4,error-feedback=lazy", pp=2)),
    "lowrank gpipe": (
        2,
        _run("pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", pp=2, pipeline_schedule="gpipe"),
    ),
    "lowrank eager": (
        2,
        _run("pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", pp=2, pipeline_schedule="eager-1f1b"),
    ),
    "lowrank epilogue": (4, _run("pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", pp=4)),
    "lowrank epilogue virtual fp16": (
        2,
        _run("pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", pp=2, precision="fp16", **VIRTUAL),
    ),
    "all three": (
        8,
        _run(
            "pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy",
            "pp-forward=fixpoint,bits=8",
            "dp-grad=powersgd,rank=2,stages=first:1",
            "embedding=fused",
            pp=2,
            tp=2,
        ),
    ),
}


LONG = (
    "powersgd",
    "powersgd, factors of 4 bits",
    "stable top-k",
    "top-k",
    "stochastic gradients",
    "lowrank",
    "delta lowbits, evicting",
)
"""100 steps; the others take 20."""


def _train_and_compare(changes: Changes, iterations: int, every: int) -> tuple[Trace, list[str]]:
    """A run, and what differed between ranks that must agree, compared after every few steps."""
    found: list[str] = []
    steps = 0

    def compare(engines: Engines) -> None:
        nonlocal steps
        steps += 1
        if steps % every == 0 or steps < 10:
            found.extend(disagreements(engines))

    engines = tiny_engines(changes)
    epoch = 8 if engines.config.data.sample_order == "fixed" else None
    return tiny_train(engines, iterations, epoch=epoch, after_step=compare), found


@pytest.mark.parametrize("name", LOSSY)
def test_replicas_agree_and_the_loss_falls(name: str) -> None:
    ranks, changes = LOSSY[name][0], _shallow(LOSSY[name][1])
    iterations = 100 if name in LONG else 20
    results = run_ranks(ranks, _train_and_compare, changes, iterations, max(iterations // 20, 1))
    assert [found for _, found in results] == [[]] * ranks
    losses = results[-1][0].losses
    assert losses[-1] < losses[0] - 0.1  # without compression it falls by 0.59 in 20 steps
    assert all(trace.losses == losses for trace, _ in results)


def test_gathered_differences_follow_the_optimizer(dense: Trace) -> None:
    """Nothing is lost for good: at 8 bits the run stays close to the dense one, at a quarter of the bytes."""
    exact = run_ranks(2, tiny_run, _run(use_distributed_optimizer=True), 6)[0]
    ours = run_ranks(2, tiny_run, _run("param-gather=fixpoint,bits=8", use_distributed_optimizer=True), 6)[0]
    assert ours.losses == pytest.approx(dense.losses, rel=2e-3)
    assert ours.losses != exact.losses
    assert ours.bytes_by_point["param-gather"] < 0.27 * exact.bytes_by_point["param-gather"]


def _gathered(changes: Changes, iterations: int) -> tuple[list[int], Trace]:
    """The numbers in this rank's share of each bucket, and what a run sent."""
    engines = tiny_engines(changes)
    found = [local_share(bucket, engines.topology.dp, True) for buffer in engines.buffers for bucket in buffer.buckets]
    return [share.stop - share.start for share in found], tiny_train(engines, iterations)


@pytest.mark.parametrize(
    ("spec", "group", "bits"),
    [("fixpoint,bits=4,group=2048", 2048, 4), ("float8", 128, 8)],
    ids=["4 bits", "8-bit float"],
)
def test_gathered_differences_send_what_the_formula_says(spec: str, group: int, bits: int) -> None:
    """To the byte: a scale of 4 bytes for each group, the codes of whole eights, all rounded up to 4 bytes."""
    ranks, iterations = 4, 3
    changes = _run(f"param-gather={spec}", precision="bf16", use_distributed_optimizer=True, **OVERLAP)
    for shares, trace in run_ranks(ranks, _gathered, changes, iterations):
        assert len(shares) > 1
        eights = 8 if bits < 8 else 1
        messages = [-(-(-(-n // group) * 4 + -(-n // eights) * eights * bits // 8) // 4) * 4 for n in shares]
        assert trace.bytes_by_point["param-gather"] == iterations * (ranks - 1) * sum(messages)
        assert trace.raw_by_point["param-gather"] == iterations * (ranks - 1) * sum(shares) * 2


def _quantized_adam(clip: float, bits: int, warmup: int = 4) -> Changes:
    # The symmetric grid has the most noise.
    changes = _run(f"dp-grad=quantized-adam,bits={bits},grid=symmetric,warmup={warmup}", precision="fp32")
    return {**changes, "optimizer": {"clip_grad": clip}}


def test_noise_of_few_bits_does_not_trip_clipping() -> None:
    """The answer's error is that of the momenta over 1 - beta: its norm is several times the gradient's."""
    free, clipped = (run_ranks(2, tiny_run, _quantized_adam(clip, bits=2), 12)[0] for clip in (0.0, 4.0))
    assert max(free.grad_norms[:4]) < 2.1, "a replica's gradient may be clipped: the case tests nothing"
    assert max(free.grad_norms[4:]) > 4.5, "there is no noise: the case tests nothing"
    assert clipped.losses == free.losses


def _frozen(changes: Changes, evaluates: bool = False) -> tuple[list[bool], list[int], int]:
    """Whether each step was skipped, after how many updates the second moments were frozen by then, and all the steps
    whose gradients were compressed; with an evaluation after each step, or none."""
    engines, frozen, on = tiny_engines(changes), [], 0

    def after(one: Engines) -> None:
        nonlocal on
        frozen.append(one.optimizer.frozen_at)
        on += one.sync.freezes_variance
        if evaluates:
            held_out = tiny_batches(one.config, one.topology, masked=False, start=1000)
            evaluation_step(one, take_batches(held_out, 2, one.topology.device))

    trace = tiny_train(engines, 16, after_step=after)
    return [norm != norm for norm in trace.grad_norms], frozen, on


def test_a_warm_up_of_updates_does_not_count_skipped_steps() -> None:
    changes = _quantized_adam(1.0, bits=8, warmup=4)
    changes["precision"] = {"fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1}
    for skipped, frozen, _ in run_ranks(2, _frozen, changes):
        assert 2 <= sum(skipped) <= 10
        taken = [sum(not skip for skip in skipped[: step + 1]) for step in range(16)]
        assert frozen == [4 if count > 4 else 0 for count in taken]


def test_a_warm_up_of_updates_does_not_count_evaluations() -> None:
    """They are no steps that were skipped: a warm-up ends where it does without them, and does not begin anew."""
    for _, frozen, on in run_ranks(2, _frozen, _quantized_adam(1.0, bits=8, warmup=4), True):
        assert frozen == [0] * 4 + [4] * 12
        assert on == 12


def _local(whole: Tensor, slot: ParamSlot) -> Tensor:
    """This rank's part of a logical tensor, with zeros for the vocabulary's padding."""
    part, offsets = whole.new_zeros(slot.param.shape), slot.spec.offsets()
    held = whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))]
    part[tuple(slice(0, size) for size in held.shape)] = held
    return part


def _clipped_sum(layout: dict[str, int], max_norm: float) -> tuple[list[float], float]:
    """Norms of the replicas' gradients, and the greatest difference between what was summed and the clipped sum."""
    changes = _quantized_adam(max_norm, bits=8, warmup=1)
    changes["parallel"] |= layout
    engines = tiny_engines(changes)
    sync, dp = engines.sync, engines.topology.dp
    slots = [slot for buffer in engines.buffers for bucket in buffer.buckets for slot in bucket.slots]

    def gradient(replica: int, slot: ParamSlot) -> Tensor:
        """Of a whole logical tensor: its value does not depend on the layout."""
        seed = replica + 10 * sum(map(ord, slot.logical_name))
        return torch.randn(slot.spec.logical_shape, generator=torch.Generator().manual_seed(seed)) * (1 + 2 * replica)

    tensors = {slot.logical_name: slot for slot in slots if not slot.spec.tied_copy}
    squares = torch.tensor([sum(gradient(r, s).square().sum() for s in tensors.values()) for r in range(dp.size)])
    engines.topology.pp.all_reduce(squares).wait()
    norms = squares.sqrt()
    engines.begin_step(1)
    for buffer in engines.buffers:
        for slot in slots:
            tied = slot.spec.tied_copy
            mine = _local(gradient(dp.rank, slot), slot) / dp.size
            buffer.grads_flat[slot.start : slot.stop] = 0.0 if tied else mine.flatten()
    assert sync.finish_reduction(64.0 * engines.holds_loss * (engines.topology.tp.rank == 0))
    worst = 0.0
    for buffer in engines.buffers:
        for slot in slots:
            factors = [min(1.0, max_norm / float(norm)) for norm in norms]
            parts = [_local(gradient(r, slot), slot) * factors[r] / dp.size for r in range(dp.size)]
            wanted = sum(parts[1:], parts[0]).flatten()
            if not slot.spec.tied:
                worst = max(worst, float((buffer.grads_flat[slot.start : slot.stop] - wanted).abs().max()))
    return norms.tolist(), worst


@pytest.mark.parametrize(
    "layout", [{}, {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}], ids=str
)
def test_each_replica_is_clipped_by_the_norm_of_its_whole_model(layout: dict[str, int]) -> None:
    """Quantized momenta: by a plain computation from whole tensors, on any layout."""
    ranks = 2 * max(layout.values(), default=1)
    results = run_ranks(ranks, _clipped_sum, layout, 400.0)
    for norms, worst in results:
        assert norms[0] < 400.0 < norms[1], "one replica is to be clipped, and one not"
        assert norms == pytest.approx(results[0][0], rel=1e-5)
        assert worst < 0.1


def _fillings(parallel: dict[str, Any]) -> dict[str, float]:
    """What second moments of zero become when they are frozen, for each logical tensor that is here."""
    changes = _quantized_adam(1.0, bits=8)
    changes["parallel"] |= parallel
    engines = tiny_engines(changes)
    optimizer = engines.optimizer
    for piece in optimizer.shards:
        spec = piece.slot.spec
        whole = torch.arange(math.prod(spec.logical_shape), dtype=torch.float64).view(spec.logical_shape) % 7
        mine = _local(whole, piece.slot).flatten()[piece.start : piece.stop]
        optimizer.inner.state[piece.main]["exp_avg_sq"].copy_(mine)
    optimizer.steps = 3
    optimizer.step({LM_LOSS: (1.0, 1.0)}, 0, lr=0.0, weight_decay=0.0, freeze_variance=True)
    found: dict[str, float] = {}
    for piece in optimizer.shards:
        filled = optimizer.inner.state[piece.main]["exp_avg_sq"]
        fractional = filled[filled != filled.round()]
        if fractional.numel():
            assert float(fractional.min()) == float(fractional.max())
            found[piece.slot.logical_name] = float(fractional[0])
    return found


@pytest.mark.parametrize(
    "parallel", [{"tensor_model_parallel_size": 2}, {"use_distributed_optimizer": True}], ids=["tp2", "sharded"]
)
def test_moments_are_frozen_alike_on_every_layout(parallel: dict[str, Any]) -> None:
    """Empty ones take the mean of their tensor, not of what one rank holds of it."""
    alone = _fillings({})
    assert len(alone) > 10
    found: dict[str, float] = {}
    for part in run_ranks(2, _fillings, parallel):
        for name, filling in part.items():
            assert filling == pytest.approx(alone[name], rel=1e-6), name
            found[name] = filling
    assert found.keys() == alone.keys()


def _rule(engines: Engines) -> RankByEntropy:
    controller = engines.sync.controllers.by_point[Point.DP_GRAD]
    assert isinstance(controller, RankController)
    return controller.rule


def _ranks_by_entropy(changes: Changes) -> tuple[list[int], list[float]]:
    engines = tiny_engines(changes)
    ranks: list[int] = []

    def note(engines: Engines) -> None:
        ranks.append(_rule(engines).rank)

    tiny_train(engines, 16, after_step=note)
    return ranks, _rule(engines).means


def test_ranks_follow_the_entropy_alike_on_every_rank() -> None:
    """Decided at the ends of windows alone, by numbers that all hold, and independent of the loss scale."""
    spec = "dp-grad=edgc,rank=8,min-rank=2,window=4,sample-every=1,max-step=2,stage-slack=0"
    results = run_ranks(4, _ranks_by_entropy, _run(spec, pp=2))
    assert all(result == results[0] for result in results)
    ranks, means = results[0]
    assert ranks[:11] == [8] * 11
    assert ranks[11:15] == [ranks[11]] * 4
    assert ranks[15] < 8
    scaled = run_ranks(4, _ranks_by_entropy, _run(spec, pp=2, precision="fp16"))[0]
    assert scaled[1] == pytest.approx(means, abs=0.1)


def _rule_and_own_rank(changes: Changes) -> tuple[tuple[int, int], int]:
    engines = tiny_engines(changes)
    tiny_train(engines, 1)
    return _rule(engines).shape, engines.plan.rounds(Point.DP_GRAD).config.rank


def test_all_stages_decide_by_the_matrices_of_the_first() -> None:
    """Whose gradients are measured; each sets the rank that its slack gives."""
    spec = "dp-grad=edgc,rank=8,min-rank=2,rule=formula,stage-slack=0.5"
    changes = {**_run(spec, pp=2), "model": {"max_position_embeddings": 512}}
    results = run_ranks(4, _rule_and_own_rank, changes)
    assert [shape for shape, _ in results] == [results[0][0]] * 4
    assert results[0][0] == (512, 32), "the embedding of positions, which the last stage does not hold"


def test_the_first_compressed_step_has_the_greatest_rank() -> None:
    """Windows of the dense warm-up are measured, but they do not move the rank."""
    spec = "dp-grad=edgc,rank=8,min-rank=2,window=2,sample-every=1,max-step=2,warmup=9,stage-slack=0"
    ranks, means = run_ranks(2, _ranks_by_entropy, _run(spec))[0]
    assert len(means) > 2
    assert ranks[:9] == [8] * 9
    assert ranks[9] == 6, "the window that ends the warm-up decides for the steps behind it"
    assert min(ranks) < 6


def test_residuals_that_are_reset_do_not_cross_iterations() -> None:
    """With one micro-batch nothing is left to correct; with several the residual works within each iteration."""

    def losses(feedback: str, micro_batches: int) -> list[float]:
        changes = _run(f"pp-backward=lowrank,rank=2,error-feedback={feedback}", pp=2)
        changes["training"] = {"global_batch_size": micro_batches}
        return run_ranks(2, tiny_run, changes, 6)[0].losses

    assert losses("lazy-reset", 1) == losses("off", 1)
    assert losses("lazy-reset", 1) != losses("lazy", 1)
    assert losses("lazy-reset", 4) != losses("off", 4)


def _spoil(changes: Changes, where: str) -> list[str]:
    engines = tiny_engines(changes)
    tiny_train(engines, 3, epoch=8)
    if engines.topology.rank == engines.topology.layout.world_size - 1:
        if where == "parameter":
            with torch.no_grad():
                next(engines.stages[0].parameters()).view(-1)[0] += 1e-6
        elif engines.channel is not None:
            size = engines.channel.shapes[0][0] * engines.channel.shapes[0][2]
            engines.channel.forward.received[0].cache("samples", 9).visit(5, size)
    return disagreements(engines)


@pytest.mark.parametrize(
    ("where", "name"), [("parameter", "on ranks 0, 1, 2 and rank 3"), ("cache", "samples.ids of pp-forward boundary 0")]
)
def test_a_difference_is_found_and_named(where: str, name: str) -> None:
    """One flipped bit of a replica, or one sample that only one end of a boundary remembers."""
    changes = _run("pp-forward=delta", **({"pp": 2, **FIXED} if where == "cache" else FIXED))
    for found in run_ranks(4, _spoil, changes, where):
        assert found
        assert name in found[0]
        assert all(line.endswith("and rank 3") for line in found)


def test_the_documented_compressor_trains(tmp_path: Path) -> None:
    """The example of docs/extend/compressor.md, from its own text, through the command line."""
    code = python_blocks("extend/compressor.md")[0]
    for example in ("class Float8Config", "class RandomRowsConfig"):
        assert example in code
    codec = code[code.index("@dataclass") : code.index("@dataclass", code.index("@dataclass") + 1)]
    assert len(codec.splitlines()) < 40
    (tmp_path / "mine.py").write_text(code)
    log = tmp_path / "log.jsonl"
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        pipeline_model_parallel_size=2,
        train_iters=20,
        compress_module=tmp_path / "mine.py",
        compress=["pp-forward=tensor-float8", "dp-grad=random-rows,share=0.5,error-feedback=on"],
        log_json_file=log,
    )
    train(4, flags)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [event["lm_loss"] for event in events if event["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1


def test_the_log_tells_what_each_point_did(tmp_path: Path) -> None:
    """--log-comm, the JSON lines, --check-orth-error-acti on tensor-parallel ranks, and evaluation through codecs."""
    log = tmp_path / "log.jsonl"
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        train_iters=4,
        global_batch_size=6,
        log_comm=True,
        check_orth_error_acti=True,
        check_replicas=2,
        eval_compressed=True,
        compress=[
            "pp-backward=lowrank,rank=2,error-feedback=lazy",
            "pp-forward=fixpoint,bits=8",
            "embedding=powersgd,rank=2",
        ],
        log_json_file=log,
    )
    result = run_cli(4, ["pretrain_gpt.py", *flags]).check()
    lines = [line for line in result.stdout.splitlines() if line.startswith(" communication at iteration")]
    assert len(lines) == 4
    assert "| embedding: " in lines[-1]
    assert re.search(r"pp-backward: [\d.]+ kB of [\d.]+ kB \([\d.]+x\), coded .*residual [\d.]+ of the grad", lines[-1])
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert events[0]["config"]["compression"]["eval_compressed"] is True
    comm = [event["comm"] for event in events if event["kind"] == "train"][-1]
    # 6 micro-batches of (16, 1, 16), on both tensor-parallel ranks; rank 2: 2 (16 + 16) numbers; a byte and 4/64.
    assert comm["pp-backward"]["raw_bytes"] == 2 * 6 * 16 * 16 * 4
    assert comm["pp-backward"]["wire_bytes"] == 2 * 6 * 2 * (16 + 16) * 4
    assert comm["pp-forward"]["wire_bytes"] == 2 * 6 * (256 + 4 * 4)
    assert 0.1 < comm["pp-backward"]["residual"] < 10
    assert 0.0 < comm["pp-backward"]["staleness"] < 10
    probes = [event for event in events if event["kind"] == "orthogonality"]
    assert [event["micro_batches"] for event in probes] == [[0, 1, 2, 3, 4]] * 4
    assert all(0 < abs(cosine) < 0.6 for event in probes for cosine in event["cosine_sim"])
    assert "Total Length: 5 | Cosine Sim: [" in result.stdout


COVERED: dict[str, tuple[int, Changes, list[str]]] = {
    "every point": (
        4,
        _run(
            "pp-forward=fixpoint,bits=4",
            "pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy",
            "dp-grad=powersgd,rank=2,stages=first:1",
            "embedding=powersgd,rank=2",
            pp=2,
        ),
        [
            "--compress pp-forward=fixpoint compresses 100.0% of the numbers that pp-forward sends",
            # Two micro-batches, both sent back after the second stage's last forward but one.
            "--compress pp-backward=lowrank compresses 50.0% of the numbers that pp-backward sends",
            "--compress dp-grad=powersgd compresses {first_stage_matrices:.1%} of the numbers that dp-grad sends",
            "--compress embedding=powersgd compresses 100.0% of the numbers that embedding sends",
        ],
    ),
    "ranks that do not pay": (
        4,
        _run(
            "pp-backward=lowrank,rank=32,error-feedback=lazy",
            "dp-grad=powersgd,rank=26",
            "embedding=powersgd,rank=25",
            pp=2,
        ),
        [
            f"warning: --compress {spec} compresses 0% of what {spec.split('=')[0]} sends: there only ranks up to "
            f"{highest} send fewer bytes than the matrices; lower rank={rank}"
            for spec, highest, rank in (
                ("pp-backward=lowrank", 10, 32),
                ("dp-grad=powersgd", 25, 26),
                ("embedding=powersgd", 24, 25),
            )
        ],
    ),
    "messages of bf16": (
        2,
        # Factors are in fp32: of a (16, 1, 32) in bf16, those of rank 6 have more bytes than it has.
        _run("pp-backward=lowrank,rank=6,error-feedback=lazy", "pp-forward=cast", pp=2, precision="bf16"),
        [
            "warning: --compress pp-backward=lowrank compresses 0% of what pp-backward sends: there only ranks up to 5 "
            "send fewer bytes than the matrices; lower rank=6",
            "--compress pp-forward=cast: the numbers have 16 bits as they are",
        ],
    ),
    "small factors": (
        4,
        # A (16, 1, 32) in bf16 has 1,024 bytes, factors of rank 10 in bf16 960. An eighth of a (128, 32) is 2,048
        # bytes, factors of rank 12 have a byte a number and a scale for 128 of a column: 1,952.
        _run(
            "pp-backward=lowrank,rank=11,factors=bf16",
            "dp-grad=powersgd,rank=14,factors=fixpoint8,min-ratio=8",
            "embedding=powersgd,rank=14,factors=fixpoint8,min-ratio=1e9",
            pp=2,
            precision="bf16",
        ),
        [
            "warning: --compress pp-backward=lowrank compresses 0% of what pp-backward sends: there only ranks up to "
            "10 send fewer bytes than the matrices; lower rank=11",
            "warning: --compress dp-grad=powersgd compresses 0% of what dp-grad sends: there only ranks up to 12 "
            "send fewer bytes than the matrices; lower rank=14",
            "warning: --compress embedding=powersgd compresses 0% of what embedding sends: there no rank sends fewer "
            "bytes than the matrices; leave it out",
        ],
    ),
    "tensor-parallel, sharded": (
        4,
        _run("tp-forward=powersgd,rank=2", "param-gather=cast", tp=2, use_distributed_optimizer=True),
        [
            "--compress tp-forward=powersgd compresses 100.0% of the numbers that tp-forward sends",
            "--compress param-gather=cast compresses 100.0% of the numbers that param-gather sends",
        ],
    ),
    "nothing to send": (2, _run("dp-grad=powersgd", "tp-forward=cast", pp=2), []),
}


def _sent_back(changes: Changes) -> tuple[float, float]:
    trace = tiny_run(changes, 2)
    return trace.bytes_by_point.get("pp-backward", 0.0), trace.raw_by_point.get("pp-backward", 0.0)


@pytest.mark.parametrize("spec", ["lowrank,rank=6", "lowrank,rank=32,error-feedback=off", "lowrank,rank=32", "cast"])
def test_messages_that_would_be_longer_go_as_they_are(spec: str) -> None:
    """Whatever the precision: what a codec is given is wider than what would be sent without it."""
    sent, raw = run_ranks(2, _sent_back, _run(f"pp-backward={spec}", pp=2, precision="bf16"))[1]
    assert sent == raw > 0


def _coverage(changes: Changes) -> list[str]:
    return coverage_notes(tiny_engines(changes))


@pytest.mark.parametrize("name", COVERED)
def test_a_run_says_what_share_it_will_compress(name: str) -> None:
    ranks, changes, wanted = COVERED[name]
    # Each of two stages has two layers of 4 matrices; beside them the first has the embeddings, the last a norm.
    layer, vectors = 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32), 32 * (3 + 1 + 4 + 1 + 4)
    first, last = 2 * (layer + vectors) + (97 + 16) * 32, 2 * (layer + vectors) + 97 * 32 + 2 * 32
    matrices = (2 * layer + (97 + 16) * 32) / (first + last)
    for found in run_ranks(ranks, _coverage, changes):
        assert found == [line.format(first_stage_matrices=matrices) for line in wanted]
