"""The ledger against the bytes that the kernel counted on the ranks' connections."""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.compression.builtin import BUILTIN
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.distributed.group import Group, Pending
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket, ParamRange
from megatron.training.step import take_batches, train_step
from tests.support.cases import SharedRanks
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_batches, tiny_engines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")

BYTES_SENT = 200  # where Linux's struct tcp_info has tcpi_bytes_sent, then tcpi_bytes_retrans


def _sent_bytes() -> int:
    """Payload bytes sent so far over this process's open TCP connections, each counted once."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            connection = socket.socket(fileno=int(entry.name))
        except OSError:  # not a socket
            continue
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT + 16)
        except OSError:  # not of TCP
            continue
        finally:
            connection.detach()  # it is not ours to close
        sent, sent_again = struct.unpack_from("QQ", info, BYTES_SENT)
        total += sent - sent_again
    return int(total)


def _counted(run: Callable[[], int]) -> tuple[int, int]:
    """(bytes that this rank reports as sent, bytes that the kernel counted)."""
    dist.barrier()
    before = _sent_bytes()
    dist.barrier()
    reported = run()
    dist.barrier()
    counted = _sent_bytes() - before
    dist.barrier()
    return reported, counted


def _collectives() -> dict[str, tuple[int, int]]:
    size = dist.get_world_size()
    group = Group(dist.group.WORLD, tuple(range(size)), dist.get_rank(), "everyone", "gloo")
    x, out = torch.ones(size * 600_000), torch.empty(600_000)
    calls: dict[str, Callable[[], Pending]] = {
        "all-reduce": lambda: group.all_reduce(x),
        "short all-reduce": lambda: group.all_reduce(x[:200_000]),
        "reduce-scatter": lambda: group.reduce_scatter(out, x),
        "all-gather": lambda: group.all_gather(x, out),
        "exchange": lambda: group.all_to_all(torch.empty_like(x).view(size, -1), x.view(size, -1)),
        "gather": lambda: group.collect(torch.empty(size if group.rank == 0 else 0, 600_000), out),
        "scatter": lambda: group.distribute(out),
    }
    counts = {}
    for name, call in calls.items():
        call().wait()  # connections are made at the first use

        def run(start: Callable[[], Pending] = call) -> int:
            pending = start()
            pending.wait()
            return pending.sent_bytes

        counts[name] = _counted(run)
    return counts


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_send_as_many_bytes_as_they_report(ranks: int) -> None:
    """A reduce-scatter sends half of an all-reduce, unlike gloo's."""
    results = run_ranks(ranks, _collectives)
    sent = {}
    for name in results[0]:
        reported = sum(result[name][0] for result in results)
        counted = sum(result[name][1] for result in results)
        assert counted == pytest.approx(reported, rel=0.005), name
        sent[name] = counted
    for name, sender in (("gather", lambda rank: rank > 0), ("scatter", lambda rank: rank == 0)):
        assert all((result[name][0] > 0) is sender(rank) for rank, result in enumerate(results)), name
    assert sent["reduce-scatter"] == pytest.approx(sent["all-reduce"] / 2, rel=0.005)


def _training(changes: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """Three steps after two that make connections and states."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # for sums in two levels, and rows in two stages
    engines = tiny_engines(changes)
    config = engines.config
    batches = tiny_batches(config, engines.topology, masked=False)
    count = config.training.global_batch_size // (config.training.micro_batch_size * engines.topology.layout.dp)

    def steps(first: int, last: int) -> int:
        engines.ledger.take_totals()
        for iteration in range(first, last):
            train_step(engines, take_batches(batches, count, engines.topology.device), iteration, 1e-3, 0.1)
        return int(sum(account["wire_bytes"] for account in engines.ledger.take_totals().values()))

    steps(0, 2)
    return _counted(lambda: steps(2, 5))


MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "uncompressed": (4, {"parallel": {"pipeline_model_parallel_size": 2}}),
    "sequence-parallel and sharded": (
        4,
        {
            "parallel": {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "use_distributed_optimizer": True,
            }
        },
    ),
    "compressed pipeline and gradients": (
        4,
        {
            "parallel": {"pipeline_model_parallel_size": 2},
            "compression": {
                "compress": [
                    "dp-grad=powersgd,rank=16",
                    "pp-forward=fixpoint,bits=4",
                    "pp-backward=lowrank,rank=8,error-feedback=lazy",
                    "embedding=fused",
                ]
            },
        },
    ),
    "messages in parts": (
        4,
        {
            "parallel": {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "scatter_gather_tensors_in_pipeline": True,
            },
            "compression": {"compress": ["pp-backward=lowrank,rank=8,error-feedback=lazy"]},
        },
    ),
    "compressed tensors and fixed-point gradients": (
        4,
        {
            "parallel": {"tensor_model_parallel_size": 2},
            "compression": {"compress": ["tp-forward=fixpoint", "tp-backward=fixpoint", "dp-grad=fixpoint,bits=4"]},
        },
    ),
    "sums in two levels, sharded": (
        4,
        {
            "parallel": {"use_distributed_optimizer": True},
            "compression": {"compress": ["dp-grad=fixpoint,levels=8/4,error-feedback=on"]},
        },
    ),
    "sums in two levels": (4, {"compression": {"compress": ["dp-grad=fixpoint,levels=8/4"]}}),
    "rows of experts in two stages": (
        4,
        {
            "parallel": {"expert_model_parallel_size": 4},
            "model": {"num_experts": [8]},
            "compression": {"compress": ["ep-dispatch-forward=fixpoint,bits=8,group=64"]},
        },
    ),
    "top-k": (2, {"compression": {"compress": ["dp-grad=topk,density=0.2"]}}),
    "chunked top-k": (2, {"model": {"num_layers": 4}, "compression": {"compress": ["dp-grad=chunked-topk"]}}),
    "whole matrices": (
        4,
        {
            "parallel": {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
            "optimizer": {"optimizer": "muon"},
        },
    ),
    "stable top-k": (2, {"compression": {"compress": ["dp-grad=stable-topk,density=0.3,interval=100"]}}),
}


ON_RANKS = SharedRanks(
    _training,
    {
        name: (ranks, ({**changes, "model": {**MODEL, **changes.get("model", {})}},))
        for name, (ranks, changes) in RUNS.items()
    },
)


KEPT = (
    "sequence-parallel and sharded",
    "compressed pipeline and gradients",
    "compressed tensors and fixed-point gradients",
    "sums in two levels, sharded",
    "rows of experts in two stages",
    "stable top-k",
)
"""They send by each collective and way that the others send by."""


@pytest.mark.parametrize("name", mark_repeats(RUNS, KEPT))
def test_the_ledger_equals_the_kernels_count(request: pytest.FixtureRequest, name: str) -> None:
    results = ON_RANKS.results(request, name)
    reported_total = sum(reported for reported, _ in results)
    counted = sum(counted for _, counted in results)
    assert reported_total > 500_000
    assert counted == pytest.approx(reported_total, rel=0.02)  # the rest is barriers


def _sent_of(specs: list[str], *shapes: tuple[int, ...]) -> int:
    """The ledger's bytes of a rank for some gradients."""
    size = dist.get_world_size()
    group = Group(dist.group.WORLD, tuple(range(size)), dist.get_rank(), "everyone", "gloo")
    ledger = Ledger()
    places: list[ParamRange] = []
    for number, shape in enumerate(shapes):
        places.append(ParamRange(f"p{number}", places[-1].stop if places else 0, shape))
    plan = CompressionPlan(read_specs(specs, Registry(BUILTIN), RunLength()))
    reducer = GradReducer([GradBucket(torch.randn(places[-1].stop), tuple(places))], group, plan, ledger, sharded=False)
    reducer.begin_step(0, 1.0)
    reducer.finish_reduction()
    return ledger.accounts[Point.DP_GRAD].wire_bytes


def test_chunked_top_k_sends_0_156_bits_of_a_number() -> None:
    """64 of 4,096: 8 bits of place and 2 of value each, and four means for a parameter, to each other rank."""
    chunks = 64 + 64 + 3
    for sent in run_ranks(3, _sent_of, ["dp-grad=chunked-topk"], (512, 512), (512, 512), (3, 4096)):
        assert sent == 2 * (chunks * 64 * (8 + 2) // 8 + 3 * 4 * 4)
    assert chunks * 64 * (8 + 2) / (chunks * 4096) == pytest.approx(0.156, abs=3e-4)


@pytest.mark.slow
def test_chunked_top_k_sends_a_model_of_25_million_numbers_in_a_190th_of_fp32() -> None:
    """A Llama of hidden size 512, 6 layers and a vocabulary of 13,312: its vectors, sent exactly, count as well."""
    layer: list[tuple[int, ...]] = [(1536, 512), (512, 512), (2 * 1376, 512), (512, 1376), (512,), (512,)]
    shapes = sorted([(13312, 512), *6 * layer, (512,)], reverse=True)
    numbers = sum(math.prod(shape) for shape in shapes)
    assert 25e6 < numbers < 26e6
    for sent in run_ranks(2, _sent_of, ["dp-grad=chunked-topk"], *shapes):
        assert 4 * numbers / sent > 190
