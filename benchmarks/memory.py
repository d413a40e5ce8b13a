"""Peak memory of a training step with and without compressors, compared with formulas (Optimus-CC, Fig. 12).

    make bench-memory                          four processes: 2 pipeline stages x 2 replicas
    make bench-memory ARGS="--hidden 1024"     another size

Each case runs in its own processes. Peak memory is the device allocator's on CUDA, else the largest resident size of a
process. "Held" is the size of the compressors' state between steps, on the rank with the most, and "formula" that of a
residual and of the factors (low-rank) or indices (stable Top-K) for everything that this rank compresses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import torch

from benchmarks import REPO
from benchmarks.models import Shape
from benchmarks.report import Column, Table
from benchmarks.steps import random_batch, run_config
from megatron.compression.linalg import matrix_shape
from megatron.distributed.ledger import gather_rows
from megatron.distributed.process_group import LaunchEnvironment, init_process_group, pick_device, shutdown
from megatron.distributed.topology import build_topology
from megatron.training.assembly import Engines, build_engines, make_layout
from megatron.training.report import peak_memory_bytes
from megatron.training.step import train_step

CASES: dict[str, list[str]] = {
    "dense": [],
    "CB": ["pp-backward=lowrank,rank=16,when=epilogue,error-feedback=off"],
    "CB+LEP": ["pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy"],
    "CB+LEP+FE+SC": [
        "pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy",
        "embedding=fused",
        "dp-grad=powersgd,rank=32,stages=first:1",
    ],
    "PowerSGD everywhere": ["dp-grad=powersgd,rank=32"],
    "Radius d=0.1": ["dp-grad=stable-topk,density=0.1,interval=4"],
}
STEPS = 6
PROCESSES = 4
MICRO_BATCHES = 4
TABLE = Table(
    Column("case", "case"),
    Column("peak MB", lambda row: row["peak"] / 1e6, ".0f"),
    Column("above dense MB", lambda row: row["above"] / 1e6, "+.0f"),
    Column("held MB", lambda row: row["held"] / 1e6, ".1f"),
    Column("formula MB", lambda row: row["formula"] / 1e6, ".1f"),
    Column("held / formula", lambda row: row["held"] / row["formula"] if row["formula"] else None, ".2f"),
)


def formula_bytes(engines: Engines) -> int:
    """Bytes of a residual, and of factors or indices, of everything that this rank compresses."""
    total = 0
    for reducer in engines.sync.reducers:
        options = reducer.compressor.config
        ranges = [param_range for units in reducer.units for unit in units for param_range in unit.ranges]
        for n, m in (matrix_shape(param_range.shape) for param_range in ranges):
            total += 4 * n * m
            total += 4 * m * min(n, m, options.rank) if hasattr(options, "rank") else 0
            total += 8 * int(n * m * options.density) if hasattr(options, "density") else 0
    channel = engines.channel
    if channel is not None:
        for point, _, state in channel.residuals():
            n, m = matrix_shape(channel.shapes[0])
            options = channel.plan.codec(point).config
            total += 4 * n * m if state.get("residual") is not None else 0
            total += 4 * m * min(n, m, options.rank) if state.get("q") is not None else 0
    return total


def run_rank(options: argparse.Namespace) -> None:
    """Run a rank of a case: 2 stages x 2 replicas, four micro-batches each; rank 0 prints a line of JSON."""
    env = LaunchEnvironment.read()
    shape = Shape(options.layers, options.hidden, options.seq, 8, options.vocab)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    parallel = {"pipeline_model_parallel_size": 2, "distributed_backend": backend}
    config = run_config(shape, "fp32", parallel, 1, PROCESSES, 128, CASES[options.case])
    init_process_group(env, backend, 5)
    device = pick_device(backend, env.local_rank)
    topology = build_topology(make_layout(config, env.world_size), device)
    engines = build_engines(config, topology, options.vocab)
    generator = torch.Generator().manual_seed(env.rank)
    batch = random_batch(torch.arange(1), options.seq, options.vocab, generator).to(device)
    for step in range(STEPS):
        train_step(engines, [batch] * MICRO_BATCHES, step, 1e-4, 0.01)
    tensors = [tensor for state in engines.compressor_states() for tensor in state.tensors.values()]
    held_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    figures = [float(peak_memory_bytes(device)), float(held_bytes), float(formula_bytes(engines))]
    rows = gather_rows(topology.control, engines.ledger, figures)
    if env.rank == 0:
        most = max(rows, key=lambda row: row[1])
        print(json.dumps({"peak": max(row[0] for row in rows), "held": most[1], "formula": most[2]}))
    shutdown()


def launch(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case in separate processes.

    Raises:
        SystemExit: when it fails, with its output.
    """
    sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "hidden", "seq", "vocab")]
    launcher = ["tools/launch.py", f"--nproc-per-node={PROCESSES}"]
    command = [sys.executable, *launcher, "-m", "benchmarks.memory", "--case", case, *sizes]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=env)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        sys.exit(f"error: the case {case} failed\n{result.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (8)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence (256)")
    parser.add_argument("--vocab", type=int, default=8192, help="entries of the vocabulary (8192)")
    parser.add_argument("--case", choices=list(CASES), help="run only this case, as a rank of tools/launch.py")
    options = parser.parse_args()
    if options.case:
        run_rank(options)
        return
    print(f"L{options.layers} h{options.hidden} s{options.seq}, vocabulary {options.vocab}, fp32, PP 2 x DP 2\n")
    print(TABLE.head())
    dense = 0.0
    for case in CASES:
        figures = launch(case, options)
        dense = dense or figures["peak"]
        print(TABLE.line({"case": case, **figures, "above": figures["peak"] - dense}), flush=True)


if __name__ == "__main__":
    main()
