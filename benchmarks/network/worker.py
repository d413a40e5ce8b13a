"""A rank of the network benchmark: builds a case, takes steps, and writes its measurements.

The process outside the hosts writes commands to a shared folder, ``command0.json`` and so on: ``build`` a case, take
``steps`` after some that are not measured (``settling``), ``measure`` rates for the planner, or ``stop``. Rank 0
answers each in ``result0.json``. The links are shaped between commands.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.network.cases import FP32, NetworkCase
from benchmarks.network.peers import peer_step
from benchmarks.steps import random_batch
from megatron.compression.points import EXPERT_POINTS
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.process_group import LaunchEnvironment, init_process_group, pick_device, shutdown
from megatron.distributed.topology import Topology, build_topology
from megatron.planner.measure import measure_all
from megatron.training.assembly import Engines, build_engines, make_layout
from megatron.training.flushless import flush_pipeline
from megatron.training.schedule_choice import ScheduleChoice
from megatron.training.step import train_step
from megatron.training.timers import Timers

POLL_SECONDS = 0.02
_IN_LAYERS = ("tp-forward", "tp-backward", *(point.value for point in EXPERT_POINTS))
"""Points whose time is inside the time that counts as computing."""
Step = Callable[[int], dict[str, float]]


def config_of(plan: dict[str, Any], case: NetworkCase, world_size: int) -> RunConfig:
    """Return the resolved configuration of a case in the layout of a plan."""
    parallel = {
        **plan["config"]["parallel"],
        "pipeline_schedule": case.schedule,
        "pipeline_max_in_flight": case.in_flight,
        "overlap_grad_reduce": case.overlap and not case.delay,
        "delay": case.delay,
        "no_pipeline_flush": not case.flush,
        "moe_two_stage": "auto" if case.two_stage else "off",
    }
    sections = {**plan["config"], "parallel": parallel, "compression": {"compress": list(case.specs)}}
    return RunConfig.from_dict(sections).resolve(world_size, cuda_available=plan["device"] == "cuda")


def batches_of(plan: dict[str, Any], config: RunConfig, topology: Topology) -> list[Batch]:
    """Micro-batches of every step, the same each time, so that stateful codecs see the same samples again."""
    count, size = plan["micro_batches"], config.training.micro_batch_size
    firsts = [(topology.dp.rank * count + number) * size for number in range(count)]
    return [
        random_batch(
            torch.arange(first, first + size), config.model.seq_length, plan["vocab"],
            torch.Generator().manual_seed(first),
        ).to(topology.device)
        for first in firsts
    ]  # fmt: skip


def our_step(engines: Engines, topology: Topology, batches: list[Batch]) -> Step:
    """Return a function that takes a step and return the parts of its time on this rank."""
    config = engines.config
    choice = ScheduleChoice(engines) if ScheduleChoice.is_needed(engines) else None

    def log_schedule(line: str) -> None:
        if topology.rank == 0:
            print(f"  {line}", flush=True)

    def step(iteration: int) -> dict[str, float]:
        timers = Timers(level=2, clock=engines.ledger.clock)
        engines.ledger.take_totals()
        if not config.parallel.overlaps_steps:  # stages may not wait for each other between such steps
            topology.control.barrier()
        start = time.perf_counter()
        outcome = train_step(engines, batches, iteration, 1e-3, 0.01, timers=timers)
        engines.ledger.clock.synchronize()
        figures = {"seconds": time.perf_counter() - start, "loss": next(iter(outcome.losses.values()), math.nan)}
        if choice is not None and choice.is_due:
            choice.decide(len(batches), config.model.seq_length, log_schedule)
        inside = sum(timers(name, 2).elapsed() for name in ("forward-compute", "backward-compute", "weight-compute"))
        accounts = engines.ledger.take_totals()
        for kind in ("coded_s", "waited_s"):
            figures[kind] = sum(account[kind] for account in accounts.values())
        nested = sum(accounts[p]["coded_s"] + accounts[p]["waited_s"] for p in _IN_LAYERS if p in accounts)
        figures["compute_s"] = inside - nested
        figures["update_s"] = timers("optimizer", 1).elapsed()
        for point in ("pp-forward", "pp-backward", "dp-grad", "embedding", "control", *_IN_LAYERS):
            figures[f"waited {point}"] = accounts.get(point, {}).get("waited_s", 0.0)
        return figures

    return step


def wait_for(path: Path) -> dict[str, Any]:
    """Wait for a command; end the process when the folder is gone."""
    while not path.exists():
        if not path.parent.is_dir():
            sys.exit("the process that gives commands is gone")
        time.sleep(POLL_SECONDS)
    command: dict[str, Any] = json.loads(path.read_text())
    return command


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    env = LaunchEnvironment.read()
    config = config_of(plan, FP32, env.world_size)
    backend = config.parallel.distributed_backend
    device = pick_device(backend, env.local_rank)
    init_process_group(env, backend, 30)
    # Groups split by node, for two-level sums and two-stage exchanges.
    topology = build_topology(make_layout(config, env.world_size), device, env.node, {"dp", "ep"})
    topologies = {topology.layout: topology}
    batches = batches_of(plan, config, topology)
    step: Step | None = None
    engines: Engines | None = None
    step_count = number = 0
    while True:
        command = wait_for(folder / f"command{number}.json")
        answer: list[dict[str, float]] = []
        if command["do"] == "stop":
            break
        if command["do"] == "measure":
            answer = [measure_all(config, plan["vocab"], command["specs"], topology, command["ranks_per_host"])]
        elif command["do"] == "build":
            if engines is not None:  # the next engines must not receive what these have sent
                flush_pipeline(engines, Timers())
            case, step, engines, step_count = NetworkCase(**command["case"]), None, None, 0
            if case.peer:
                step = peer_step(case.peer, case.rank, plan, config, topology, batches)
            else:
                case_config = config_of(plan, case, env.world_size)
                layout = make_layout(case_config, env.world_size)  # a schedule may have virtual stages
                if layout not in topologies:
                    topologies[layout] = build_topology(layout, device, env.node, {"dp", "ep"})
                engines = build_engines(case_config, topologies[layout], plan["vocab"])
                step = our_step(engines, topologies[layout], batches)
        step_figures: list[dict[str, float]] = []  # gathered after the last step: to gather, ranks wait for each other
        settling = command.get("settling", 0)
        for _ in range(settling + command.get("steps", 0)):
            assert step is not None
            step_figures.append(step(step_count))
            step_count += 1
        for figures in step_figures[settling:]:
            rows = gather_rows(topology.control, Ledger(), list(figures.values()))
            columns = zip(*rows, strict=True)
            # The slowest rank's time, the loss of the last stage, and means of the other figures.
            answer.append(
                {
                    name: max(column) if name in ("seconds", "loss") else sum(column) / len(column)
                    for name, column in zip(figures, columns, strict=True)
                }
            )
            answer[-1]["slowest_compute_s"] = max(row[list(figures).index("compute_s")] for row in rows)
        if env.rank == 0:
            partial_file = folder / f"result{number}.partial"
            partial_file.write_text(json.dumps(answer))
            os.replace(partial_file, folder / f"result{number}.json")
        number += 1
    shutdown()


if __name__ == "__main__":
    main()
