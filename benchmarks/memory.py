"""Peak memory of training steps: of compressors, beside formulas (Optimus-CC, Fig. 12), and of pipeline schedules.

    make bench-memory                          four processes: 2 pipeline stages x 2 replicas, then 4 stages
    make bench-memory ARGS="--hidden 1024"     another size

Each case runs in its own processes. Peak memory is the device allocator's on CUDA, else the largest resident size of a
process. "Held" is the size of the compressors' state between steps, on the rank with the most, and "formula" that of a
residual and of the factors (low-rank) or indices (stable Top-K) for everything that this rank compresses. "In steps" is
what steps add to the peak of a process: activations, gradients of activations, and records for weight gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """A run on four processes.

    Args:
        specs: specs of its compressors.
        stages: pipeline stages.
        schedule: order of their passes.
        length_factor: length of its sequences, in multiples of --seq. Schedules have long ones, whose activations need
            most of the memory.
    """

    specs: Sequence[str] = ()
    stages: int = 2
    schedule: str = "1f1b"
    length_factor: int = 1


COMPRESSORS = {
    "dense": Case(),
    "CB": Case(["pp-backward=lowrank,rank=16,when=epilogue,error-feedback=off"]),
    "CB+LEP": Case(["pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy"]),
    "CB+LEP+FE+SC": Case(
        [
            "pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy",
            "embedding=fused",
            "dp-grad=powersgd,rank=32,stages=first:1",
        ]
    ),
    "PowerSGD everywhere": Case(["dp-grad=powersgd,rank=32"]),
    "Radius d=0.1": Case(["dp-grad=stable-topk,density=0.1,interval=4"]),
}
SCHEDULES = {name: Case((), 4, name, 4) for name in ("1f1b", "zb-h1", "eager-1f1b")}
CASES = {**COMPRESSORS, **SCHEDULES}
STEPS = 6
PROCESSES = 4
TABLE = Table(
    Column("case", "case"),
    Column("peak MB", lambda row: row["peak"] / 1e6, ".0f"),
    Column("above dense MB", lambda row: row["above"] / 1e6, "+.0f"),
    Column("held MB", lambda row: row["held"] / 1e6, ".1f"),
    Column("formula MB", lambda row: row["formula"] / 1e6, ".1f"),
    Column("held / formula", lambda row: row["held"] / row["formula"] if row["formula"] else None, ".2f"),
)
SCHEDULE_TABLE = Table(
    Column("schedule", "case"),
    *(Column(f"rank {rank}: in steps, MB", f"rank {rank}", ".0f") for rank in range(PROCESSES)),
    Column("largest / 1f1b's", lambda row: max(row["in_steps"]) / row["of_1f1b"], ".2f"),
    Column("largest peak, MB", lambda row: row["peak"] / 1e6, ".0f"),
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
    """Run a rank of a case; rank 0 prints a line of JSON."""
    env = LaunchEnvironment.read()
    case = CASES[options.case]
    shape = Shape(options.layers, options.hidden, case.length_factor * options.seq, 8, options.vocab)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    parallel = {
        "pipeline_model_parallel_size": case.stages,
        "pipeline_schedule": case.schedule,
        "distributed_backend": backend,
    }
    config = run_config(shape, "fp32", parallel, 1, PROCESSES, 128, case.specs)
    init_process_group(env, backend, 5)
    device = pick_device(backend, env.local_rank)
    topology = build_topology(make_layout(config, env.world_size), device)
    engines = build_engines(config, topology, options.vocab)
    generator = torch.Generator().manual_seed(env.rank)
    batch = random_batch(torch.arange(1), shape.seq, options.vocab, generator).to(device)
    before = peak_memory_bytes(device)
    for step in range(STEPS):
        train_step(engines, [batch] * (shape.samples * case.stages // PROCESSES), step, 1e-4, 0.01)
    tensors = [tensor for state in engines.compressor_states() for tensor in state.tensors.values()]
    held_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    peak = peak_memory_bytes(device)
    rows = gather_rows(topology.control, engines.ledger, [peak, held_bytes, formula_bytes(engines), peak - before])
    if env.rank == 0:
        peaks, held, formulas, in_steps = zip(*rows, strict=True)
        formula = formulas[held.index(max(held))]
        print(json.dumps({"peak": max(peaks), "held": max(held), "formula": formula, "in_steps": in_steps}))
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
    for case in COMPRESSORS:
        figures = launch(case, options)
        dense = dense or figures["peak"]
        print(TABLE.line({"case": case, **figures, "above": figures["peak"] - dense}), flush=True)
    print(
        f"\nPP 4, 8 micro-batches of {SCHEDULES['1f1b'].length_factor * options.seq} tokens\n\n{SCHEDULE_TABLE.head()}"
    )
    of_1f1b = 0.0
    for case in SCHEDULES:
        figures = launch(case, options)
        of_1f1b = of_1f1b or max(figures["in_steps"])
        by_rank = {f"rank {rank}": in_steps / 1e6 for rank, in_steps in enumerate(figures["in_steps"])}
        print(SCHEDULE_TABLE.line({"case": case, **figures, **by_rank, "of_1f1b": of_1f1b}), flush=True)


if __name__ == "__main__":
    main()
