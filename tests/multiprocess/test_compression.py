"""Compressors in training runs: lossless compressors change nothing, and all ranks keep agreeing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megatron.training.assembly import Engines
from megatron.training.replica_check import disagreements
from tests.support import combinations
from tests.support.cases import SharedRanks
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, merge, tiny_engines, tiny_run, tiny_train

Changes = dict[str, dict[str, Any]]


def _run(
    *specs: str, tp: int = 1, pp: int = 1, precision: str = "fp32", order: str = "lazy", **parallel: Any
) -> Changes:
    return {
        "data": {"sample_order": order},
        "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **parallel},
        "compression": {"compress": list(specs)},
        "precision": {} if precision == "fp32" else {precision: True, "initial_loss_scale": 2.0**16},
    }


VIRTUAL: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": 1}
FIXED: dict[str, Any] = {"order": "fixed"}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
FULL_RANK = "rank=32,min-ratio=0"
EXACT_STEPS, STEPS, LONG_STEPS = 3, 6, 8

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
    "stable top-k, density 1": (4, _run("dp-grad=stable-topk,density=1,interval=2", pp=2)),
    "stable top-k, density 1, sharded": (
        2,
        _run("dp-grad=stable-topk,density=1,interval=2", use_distributed_optimizer=True, **OVERLAP),
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
    "embedding stable top-k, density 1": (8, _run("embedding=stable-topk,density=1,interval=2", pp=2, tp=2)),
    "embedding powersgd, full rank": (4, _run(f"embedding=powersgd,{FULL_RANK}", pp=2, tp=2)),
}


def _shallow(changes: Changes) -> Changes:
    """Two layers in place of four, where neither stages nor buckets of small groups of parameters need more."""
    parallel = changes["parallel"]
    needs_more = parallel["pipeline_model_parallel_size"] > 2 or {*VIRTUAL, *OVERLAP} & parallel.keys()
    return changes if needs_more else {**changes, "model": {"num_layers": 2}}


@cache
def _dense(layers: int = 4) -> Trace:
    return tiny_run({"model": {"num_layers": layers}, "precision": {"fp64": True}}, EXACT_STEPS)


LOSSLESS_RUNS = SharedRanks(
    tiny_run,
    {
        name: (ranks, ({**_shallow(changes), "precision": {"fp64": True}}, EXACT_STEPS))
        for name, (ranks, changes) in LOSSLESS.items()
    },
)


# What they show, others do on fewer ranks or with more settings at once.
LOSSLESS_REPEATS = (
    "sharded parameter servers",
    "powersgd, full rank",
    "stable top-k, density 1",
    "fused embedding",
    "fused embedding and powersgd",
    "embedding stable top-k, density 1",
    "embedding powersgd, full rank",
)


@pytest.mark.parametrize("name", mark_repeats(LOSSLESS, keep=LOSSLESS.keys() - {*LOSSLESS_REPEATS}))
def test_lossless_settings_give_the_dense_run(request: pytest.FixtureRequest | None, name: str) -> None:
    dense = _dense(_shallow(LOSSLESS[name][1]).get("model", {}).get("num_layers", 4))
    for trace in LOSSLESS_RUNS.results(request, name):
        assert trace.losses == pytest.approx(dense.losses, rel=1e-10)
        assert trace.grad_norms == pytest.approx(dense.grad_norms, rel=1e-10)


LOSSY: dict[str, tuple[int, Changes]] = {
    "powersgd": (4, _run("dp-grad=powersgd,rank=2", pp=2)),
    "powersgd, factors of 4 bits": (4, _run("dp-grad=powersgd,rank=2,factors=fixpoint4", pp=2)),
    "tensor powersgd, bf16 factors": (
        2,
        _run("tp-forward=powersgd,rank=12,factors=bf16", "tp-backward=powersgd,rank=12,factors=bf16", tp=2),
    ),
    "powersgd without state": (2, _run("dp-grad=powersgd,rank=2,warm-start=off,error-feedback=off")),
    "stable top-k": (4, _run("dp-grad=stable-topk,density=0.3,interval=4", pp=2)),
    "embedding stable top-k": (
        4,
        _run("embedding=stable-topk,density=0.2,interval=3", "dp-grad=stable-topk,density=0.3,interval=4", pp=2),
    ),
    "embedding top-k fused, fp16": (4, _run("embedding=topk,density=0.2,fused=on", pp=2, precision="fp16")),
    "top-k": (2, _run("dp-grad=topk,density=1~0.2@5")),
    "chunked top-k over senders, fading": (
        4,
        _run(
            "dp-grad=chunked-topk,chunk=64,k=8,bits=4,merge=senders,feedback-decay=0.95",
            "embedding=chunked-topk,chunk=256",
            pp=2,
        ),
    ),
    "stochastic gradients on tensor-parallel ranks": (4, _run("dp-grad=fixpoint,bits=4,rounding=stochastic", tp=2)),
    "stochastic gradients": (4, _run("dp-grad=fixpoint,bits=4,rounding=stochastic")),
    "quantized adam": (4, _run("dp-grad=quantized-adam,bits=6,warmup=4", pp=2)),
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
    "fixpoint tensor stochastic": (2, _run("tp-forward=fixpoint,bits=6,rounding=stochastic", tp=2)),
    "fixpoint sequence": (2, _run("tp-forward=fixpoint", "tp-backward=fixpoint", tp=2, sequence_parallel=True)),
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
            "dp-grad=powersgd,rank=24@0/2@2/3@4",
            "pp-forward=fixpoint,bits=8@0/4@4",
            "pp-backward=lowrank,rank=8~2@5,warmup=2,error-feedback=lazy",
            pp=2,
        ),
    ),
    "edgc by formula, sharded": (
        2,
        _run("dp-grad=edgc,rank=8,window=3,sample-every=1,rule=formula", use_distributed_optimizer=True, **OVERLAP),
    ),
    "lowrank": (2, _run("pp-backward=lowrank,rank=2,error-feedback=lazy", pp=2)),
    "lowrank eager": (
        2,
        _run("pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", pp=2, pipeline_schedule="eager-1f1b"),
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

COMBINED: dict[str, tuple[int, Changes]] = {
    "powersgd bf16 overlapped": (4, _run("dp-grad=powersgd,rank=2", tp=2, precision="bf16", **OVERLAP)),
    "stable top-k with neighbors, overlapped bf16": (
        4,
        _run("dp-grad=stable-topk,density=0.05,interval=4,range=3,flush=rotate", tp=2, precision="bf16", **OVERLAP),
    ),
    "quantized adam, bf16 sharded": (
        4,
        _run("dp-grad=quantized-adam,bits=8,warmup=4", tp=2, precision="bf16", use_distributed_optimizer=True),
    ),
    "tensor powersgd, recomputed": (
        2,
        {
            **_run("tp-forward=powersgd,rank=12", "tp-backward=powersgd,rank=12", tp=2, precision="bf16"),
            "recompute": {"recompute_granularity": "full", "recompute_method": "uniform"},
        },
    ),
    "delta bf16 virtual stochastic": (
        2,
        _run("pp-forward=delta,bits=3,rounding=stochastic", pp=2, precision="bf16", **VIRTUAL, **FIXED),
    ),
    "delta fp16 four stages gpipe": (
        4,
        _run("pp-forward=delta,bits=3", pp=4, precision="fp16", pipeline_schedule="gpipe", **FIXED),
    ),
    "edgc": (
        8,
        _run("dp-grad=edgc,rank=8,min-rank=2,window=4,sample-every=2,stage-slack=0.5", pp=2, tp=2, precision="fp16"),
    ),
    "lowrank epilogue virtual fp16": (
        2,
        _run("pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy", pp=2, precision="fp16", **VIRTUAL),
    ),
}
"""For GPUs and --all-combinations. On CPUs ``test_composition`` has every pair of these settings."""


LONG = (
    "powersgd",
    "powersgd, factors of 4 bits",
    "stable top-k",
    "top-k",
    "stochastic gradients",
    "lowrank",
    "delta lowbits, evicting",
)
"""The others take fewer steps."""


def train_and_compare(changes: Changes, steps: int) -> tuple[Trace, list[str]]:
    """A run on two batches in turn, and differences between ranks that must agree, compared after some steps."""
    differences: list[str] = []
    count = 0

    def compare(engines: Engines) -> None:
        nonlocal count
        count += 1
        if count in (1, steps // 2, steps):
            differences.extend(disagreements(engines))

    engines = tiny_engines(merge(changes, {"optimizer": {"lr": 8e-3}}))
    return tiny_train(engines, steps, epoch=8, after_step=compare), differences


def check_fall(losses: list[float]) -> None:
    """Without compression the losses of both batches fall by 0.9 in 6 steps."""
    assert sum(losses[-2:]) / 2 < sum(losses[:2]) / 2 - 0.3, losses


LOSSY_RUNS = SharedRanks(
    train_and_compare,
    {
        name: (ranks, (_shallow(changes), LONG_STEPS if name in LONG else STEPS))
        for name, (ranks, changes) in (LOSSY | COMBINED).items()
    },
)


# Their compressors are in other cases, of fewer ranks or steps, and in test_composition.
LOSSY_REPEATS = (
    "powersgd, factors of 4 bits",
    "fixpoint pipeline",
    "parameters bf16 in 4 bits, long groups",
    "8-bit floats on tensor-parallel ranks",
    "all three",
)
LOSSY_NAMES = mark_repeats(LOSSY, keep=LOSSY.keys() - {*LOSSY_REPEATS})


@pytest.mark.parametrize("name", [*LOSSY_NAMES, *(COMBINED if combinations.all_combinations else ())])
def test_replicas_agree_and_the_loss_falls(request: pytest.FixtureRequest | None, name: str) -> None:
    results = LOSSY_RUNS.results(request, name)
    assert [differences for _, differences in results] == [[]] * (LOSSY | COMBINED)[name][0]
    losses = results[-1][0].losses
    check_fall(losses)
    assert all(trace.losses == losses for trace, _ in results)


def test_residuals_that_are_reset_do_not_cross_iterations() -> None:
    """With one micro-batch nothing is left to correct; with several the residual works within each iteration."""

    def losses(feedback: str, micro_batches: int) -> list[float]:
        changes = _run(f"pp-backward=lowrank,rank=2,error-feedback={feedback}", pp=2)
        changes["training"] = {"global_batch_size": micro_batches}
        return run_ranks(2, tiny_run, changes, 3)[0].losses

    assert losses("lazy-reset", 1) == losses("off", 1)
    assert losses("lazy-reset", 1) != losses("lazy", 1)
    assert losses("lazy-reset", 4) != losses("off", 4)


def _spoil(changes: Changes, fault: str) -> list[str]:
    engines = tiny_engines(changes)
    tiny_train(engines, 3, epoch=8)
    if engines.topology.rank == engines.topology.layout.world_size - 1:
        if fault == "parameter":
            with torch.no_grad():
                next(engines.stages[0].parameters()).view(-1)[0] += 1e-6
        elif engines.channel is not None:
            size = engines.channel.shapes[0][0] * engines.channel.shapes[0][2]
            engines.channel.forward.received[0].cache("samples", 9).visit(5, size)
    return disagreements(engines)


@pytest.mark.parametrize(
    ("fault", "name"), [("parameter", "on ranks 0, 1, 2 and rank 3"), ("cache", "samples.ids of pp-forward boundary 0")]
)
def test_a_difference_is_found_and_named(fault: str, name: str) -> None:
    """A flipped bit of a replica, or a sample that only one end of a boundary remembers."""
    changes = _run("pp-forward=delta", **({"pp": 2, **FIXED} if fault == "cache" else FIXED))
    for differences in run_ranks(4, _spoil, changes, fault):
        assert differences
        assert name in differences[0]
        assert all(line.endswith("and rank 3") for line in differences)
