"""Peak memory of a training step with and without compressors, beside what the formulas allow (Optimus-CC, Fig. 12).

    make bench-memory                          four processes: 2 pipeline stages x 2 replicas
    make bench-memory ARGS="--hidden 1024"     another size

Each case runs in processes of its own. Peak memory is what the device's allocator reports on CUDA, else the resident
size of the process that used most. "Held" is what the compressors keep between steps on the rank that keeps most, and
"formula" is one residual and the factors (low-rank) or indices (stable Top-K) of what that rank compresses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import REPO
from benchmarks.tables import Cells, Column, Table
from benchmarks.train_sides import Shape
from benchmarks.train_steps import random_batch, run_config
from megatron.compression.linalg import matrix_shape
from megatron.compression.state import CompressorState
from megatron.config.run import RunConfig
from megatron.distributed.process_group import LaunchEnvironment, init_process_group, pick_device, shutdown
from megatron.distributed.topology import build_topology
from megatron.training.assembly import Engines, build_engines, layout_of
from megatron.training.report import peak_memory_bytes
from megatron.training.step import train_step
from megatron.training.traffic import gather_rows

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


def config_of(specs: list[str], options: argparse.Namespace) -> RunConfig:
    """The configuration of a case: 2 stages x 2 replicas, four micro-batches each."""
    shape = Shape(options.layers, options.hidden, options.seq, 8, options.vocab)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    parallel = {"pipeline_model_parallel_size": 2, "distributed_backend": backend}
    return run_config(shape, "fp32", parallel, 1, PROCESSES, 128, specs)


def held_bytes(state: CompressorState) -> int:
    """Bytes of everything that a state keeps between steps."""
    return sum(t.numel() * t.element_size() for t in state.tensors.values())


def formula_bytes(engines: Engines) -> int:
    """Bytes by the formula: one residual, and factors or indices, of everything that this rank compresses."""
    total = 0
    for reducer in engines.sync.reducers:
        options = reducer.compressor.config
        for units in reducer.units:
            for unit in units:
                for place in unit.ranges:
                    n, m = matrix_shape(place.shape)
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


def run_case(options: argparse.Namespace) -> None:
    """Runs one rank of one case; rank 0 prints a line of JSON."""
    env = LaunchEnvironment.read()
    config = config_of(CASES[options.case], options)
    backend = config.parallel.distributed_backend
    init_process_group(env, backend, 5)
    device = pick_device(backend, env.local_rank)
    topology = build_topology(layout_of(config, env.world_size), device)
    engines = build_engines(config, topology, options.vocab)
    generator = torch.Generator().manual_seed(env.rank)
    batch = random_batch(torch.arange(1), options.seq, options.vocab, generator).to(device)
    for step in range(STEPS):
        train_step(engines, [batch] * 4, step, 1e-4, 0.01)
    held = sum(held_bytes(state) for state in engines.compressor_states())
    rows = gather_rows(
        topology.control, engines.ledger, [float(peak_memory_bytes(device)), float(held), float(formula_bytes(engines))]
    )
    if env.rank == 0:
        worst = max(rows, key=lambda row: row[1])
        print(json.dumps({"peak": max(row[0] for row in rows), "held": worst[1], "formula": worst[2]}))
    shutdown()


def launch(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a case in processes of its own.

    Raises:
        SystemExit: when it fails, with its output.
    """
    sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "hidden", "seq", "vocab")]
    launcher = ["tools/launch.py", f"--nproc-per-node={PROCESSES}"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "benchmarks.memory", "--case", case, *sizes],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"error: the case {case} failed\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _mb(name: str) -> Callable[[Cells], float]:
    """A function that converts bytes to MB."""
    return lambda row: float(row[name]) / 1e6


TABLE = Table(
    Column("case", "case"),
    Column("peak MB", _mb("peak"), ".0f"),
    Column("above dense MB", _mb("above"), "+.0f"),
    Column("held MB", _mb("held"), ".1f"),
    Column("formula MB", _mb("formula"), ".1f"),
    Column("held / formula", lambda row: row["held"] / row["formula"] if row["formula"] else None, ".2f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    parser.add_argument("--hidden", type=int, default=512, help="its hidden size (512)")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence (256)")
    parser.add_argument("--vocab", type=int, default=8192, help="entries of the vocabulary (8192)")
    parser.add_argument("--case", choices=list(CASES), help="run this case only, as one rank of torchrun")
    options = parser.parse_args()
    if options.case:
        run_case(options)
        return
    print(f"L{options.layers} h{options.hidden} s{options.seq}, vocabulary {options.vocab}, fp32, PP 2 x DP 2\n")
    print(TABLE.head())
    dense = 0.0
    for case in CASES:
        found = launch(case, options)
        dense = dense or found["peak"]
        print(TABLE.line({"case": case, **found, "above": found["peak"] - dense}), flush=True)


if __name__ == "__main__":
    main()
