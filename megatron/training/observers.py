"""Observers of a run: traces and experiments requested by flags."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.base.errors import UserError
from megatron.config.logs import LoggingConfig
from megatron.distributed.clock import Clock
from megatron.distributed.kernel_trace import DeviceKernels
from megatron.distributed.observer import Observer
from megatron.distributed.topology import Topology
from megatron.distributed.trace import Trace
from megatron.parallel.data.buffer import FlatBuffer
from megatron.training.error_probe import ErrorProbe
from megatron.training.gradient_probe import GradientProbe


def build_experiments(logs: LoggingConfig, topology: Topology, buffers: Sequence[FlatBuffer]) -> list[Observer]:
    """Build the experiments' observers, in the order of their records."""
    experiments: list[Observer] = []
    if logs.check_orth_error_acti:
        experiments.append(ErrorProbe())
    if logs.log_gradients:
        shares = (logs.log_gradients_density, logs.log_gradients_bins)
        experiments.append(GradientProbe(buffers, topology, *shares, logs.log_gradients_interval))
    return experiments


def build_traces(logs: LoggingConfig, schedule: str, topology: Topology, clock: Clock) -> list[Observer]:
    """Build the observers that trace this rank's steps with its device's clock, under a pipeline schedule.

    Raises:
        UserError: when the folder cannot be created.
    """
    if logs.profile_trace is None:
        return []
    # Rank 0's time identifies this start of the run. A collective call: before anything that may fail on a single rank.
    start_time = torch.tensor([time.time_ns()])
    topology.control.broadcast(start_time).wait()
    folder, at = Path(logs.profile_trace), topology.coordinates
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--profile-trace {folder}: {error.strerror}; name a folder that can be written") from error
    trace = Trace(
        folder / f"trace_rank_{topology.rank:05d}.json",
        topology.rank,
        f"tp {at.tp} pp {at.pp} dp {at.dp}",
        logs.profile_step_start,
        logs.profile_step_end,
        clock=clock,
        kernels=DeviceKernels() if topology.device.type == "cuda" else None,
        layout=topology.layout,
        schedule=schedule,
        run=f"{int(start_time):x}",
        barrier=topology.control.barrier,
    )
    return [trace]
