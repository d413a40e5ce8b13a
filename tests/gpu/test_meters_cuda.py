"""Meters and traces on a CUDA device: they tell the device's time, and nothing waits for it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.distributed.clock import clock_of
from megatron.distributed.topology import Topology, build_topology, single_process
from megatron.training.assembly import build_engines, make_layout
from megatron.training.step import take_batches, train_step
from tests.support.one_gpu import ONE_CHANNEL, join_on_one_gpu
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_batches, tiny_config
from tools.merge_traces import read_trace, summarize

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(900)]  # includes the wait to be alone

ENTRIES = 64_000
"""Of the vocabulary: its gradient alone is hundreds of MB, beside which computing takes no time."""


def _config(changes: dict[str, dict[str, Any]], world_size: int) -> RunConfig:
    config = tiny_config(changes, world_size)
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, distributed_backend="nccl"))


def _steps(config: RunConfig, topology: Topology, warm: int, count: int, vocab: int) -> dict[str, float]:
    """Trains; returns the ledger's figures of the last ``count`` steps, and their duration by the host's clock."""
    engines = build_engines(config, topology, vocab)
    micro_batches = config.training.global_batch_size // config.training.micro_batch_size // topology.dp.size
    batches = tiny_batches(config, topology, masked=False)
    ledger, began = engines.ledger, 0.0
    for iteration in range(warm + count):
        step_batches = take_batches(batches, micro_batches, topology.device)
        if iteration == warm:
            topology.control.barrier()
            ledger.clock.synchronize()
            ledger.clear()
            began = time.perf_counter()
        train_step(engines, step_batches, iteration, 1e-3, 0.0)
    ledger.clock.synchronize()
    seconds = time.perf_counter() - began
    accounts = ledger.take_totals().values()
    return {
        "seconds": seconds,
        "computed": ledger.take_computed(),
        "coded": sum(account["coded_s"] for account in accounts),
        "waited": sum(account["waited_s"] for account in accounts),
    }


def _saturated(changes: dict[str, dict[str, Any]], world_size: int, vocab: int) -> dict[str, float]:
    device = join_on_one_gpu(240)
    config = _config(changes, world_size)
    topology = build_topology(make_layout(config, world_size), device)
    return _steps(config, topology, 2, 3, vocab)


WIDE: dict[str, Any] = {"hidden_size": 1024, "num_layers": 2}
LONG: dict[str, Any] = {"hidden_size": 1024, "num_layers": 2, "seq_length": 2048, "max_position_embeddings": 2048}
NARROW: dict[str, Any] = {**LONG, "kv_channels": 32, "ffn_hidden_size": 128}
"""Messages of the same size, between layers that compute next to nothing: both stages share the GPU."""
SATURATED: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "sums of replicas": ({"model": WIDE}, ENTRIES),
    "sums of replicas in 8 bits": ({"model": WIDE, "compression": {"compress": ["dp-grad=fixpoint,bits=8"]}}, ENTRIES),
    "sharded optimizer, bf16": (
        {"model": WIDE, "precision": {"bf16": True}, "parallel": {"use_distributed_optimizer": True}},
        ENTRIES,
    ),
    "activations between stages": (
        {
            "model": NARROW,
            "parallel": {"pipeline_model_parallel_size": 2},
            "training": {"micro_batch_size": 4, "global_batch_size": 16},
        },
        128,
    ),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", SATURATED)
def test_computing_coding_and_waiting_explain_a_step_on_saturated_links(case: str) -> None:
    changes, vocab = SATURATED[case]
    for figures in run_ranks(2, _saturated, changes, 2, vocab, timeout=280, init=False, env=ONE_CHANNEL):
        seconds = figures["computed"] + figures["coded"] + figures["waited"]
        assert 0.9 * figures["seconds"] <= seconds <= 1.1 * figures["seconds"], figures
        assert figures["waited"] > 0.5 * figures["seconds"], figures
        if "bits" in case:
            assert figures["coded"] > 0


def test_without_peers_computing_is_the_whole_step() -> None:
    changes: dict[str, dict[str, Any]] = {
        "model": {**LONG, "num_layers": 8},
        "training": {"micro_batch_size": 4, "global_batch_size": 4},
    }
    figures = _steps(_config(changes, 1), single_process("cuda"), 2, 3, 50_304)
    assert (figures["coded"], figures["waited"]) == (0.0, 0.0)
    assert 0.9 * figures["seconds"] <= figures["computed"] <= 1.01 * figures["seconds"], figures


CYCLES = 400_000_000
"""That a device spins: more than 0.1 s on any."""


def test_an_interval_is_the_devices_time_and_nobody_waits_for_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock, seconds = clock_of(device), list[float]()
    torch.cuda.synchronize()
    start = clock.mark()
    torch.cuda._sleep(CYCLES)
    stop = clock.mark()
    clock.between(start, stop, seconds.append)
    clock.report_known()
    assert seconds == []  # the host got here long before
    clock.synchronize()
    assert 0.1 < seconds[0] < 10


def test_marks_are_placed_on_the_hosts_clock() -> None:
    clock = clock_of(torch.device("cuda", torch.cuda.current_device()))
    clock.anchor()
    before = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    mark = clock.mark()
    issued = time.perf_counter()
    clock.synchronize()
    assert issued < clock.host_time(mark) < time.perf_counter() + 1e-3
    assert clock.host_time(mark) > before + 0.1


def test_the_trace_holds_the_devices_kernels_inside_its_iterations(tmp_path: Path) -> None:
    logging = {"profile_trace": str(tmp_path), "profile_step_start": 2, "profile_step_end": 4}
    changes: dict[str, dict[str, Any]] = {"model": {"hidden_size": 256, "num_layers": 4}, "logging": logging}
    _steps(_config(changes, 1), single_process("cuda"), 2, 3, 128)
    (path,) = tmp_path.iterdir()
    trace = read_trace(path)
    assert trace.iterations == [2, 3]
    spans = [event for event in trace.events if event["ph"] == "X" and event["tid"] == 0]
    kernels = [event for event in trace.events if event.get("cat") == "kernel"]
    assert {"forward", "backward", "optimizer", "iteration"} <= {event["name"] for event in spans}
    assert any(word in event["name"].lower() for event in kernels for word in ("gemm", "cutlass", "nvjet"))
    slack = 5_000.0  # microseconds between the profiler's clock and ours
    for iteration in (event for event in spans if event["name"] == "iteration"):
        kernels_inside = [e for e in kernels if e["args"]["iteration"] == iteration["args"]["iteration"]]
        assert len(kernels_inside) > 50
        for event in kernels_inside:
            assert iteration["ts"] - slack <= event["ts"]
            assert event["ts"] + event["dur"] <= iteration["ts"] + iteration["dur"] + slack
    assert "| 0 (tp 0 pp 0 dp 0) |" in summarize([trace])
    assert json.loads(path.read_text())["displayTimeUnit"] == "ms"
