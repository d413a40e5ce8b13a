"""Checks of a run against the machine, before the ranks meet and before large allocations; notes on its settings."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.compression.schedule import RunLength
from megatron.config.memory import check_memory, memory_of_this_machine
from megatron.config.run import RunConfig
from megatron.distributed.agreement import any_rank
from megatron.distributed.interfaces import SLOW_START
from megatron.distributed.process_group import LaunchEnvironment
from megatron.kernels.fp8 import EIGHT_BIT_UNITS


def check_machine(config: RunConfig, env: LaunchEnvironment) -> None:
    """Check memory, GPU support for --fp8, the kill switch and the folders that compressors write to.

    Raises:
        UserError: when the machine cannot run it.
    """
    check_room(config, env)
    if config.precision.fp8 is not None:
        device = env.local_rank % torch.cuda.device_count()
        if (capability := torch.cuda.get_device_capability(device)) < EIGHT_BIT_UNITS:
            raise UserError(
                f"--fp8 {config.precision.fp8}: {torch.cuda.get_device_name(device)} has compute capability "
                f"{capability[0]}.{capability[1]}, and 8-bit products need {EIGHT_BIT_UNITS[0]}.{EIGHT_BIT_UNITS[1]} "
                "(Ada, Hopper); leave it out"
            )
    switch = config.training.kill_switch_file
    if switch is not None and os.path.lexists(switch):
        raise UserError(f"--kill-switch-file {switch} exists already, so the run would end at once; remove it first")
    for spec in config.compression.specs(RunLength(config.training.planned_iters)).values():
        folders = () if spec.registration.codec is None else spec.make_codec().traits.folders
        for folder in folders:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder) as stream:
                    stream.write(b"\0")
            except OSError as error:
                raise UserError(
                    f"--compress {spec.point.value}={spec.name}: folder={folder}: cannot be written "
                    f"({error.strerror}); name a folder on a disk"
                ) from error


def check_room(config: RunConfig, env: LaunchEnvironment, vocab_size: int | None = None) -> None:
    """Compare the run's minimum memory with the available memory.

    Args:
        config: the resolved configuration.
        env: this process's place.
        vocab_size: entries of the tokenizer, once it is known.

    Raises:
        UserError: when it cannot fit.
    """
    if config.parallel.distributed_backend == "nccl":
        count = torch.cuda.device_count()
        gpu = torch.cuda.get_device_properties(env.local_rank % count)
        sharing = -(-env.num_local_ranks // count)
        there_is, location = gpu.total_memory // sharing, f"on its GPU ({gpu.name})"
        location += f" for each of the {sharing} ranks that share it" if sharing > 1 else ""
    else:
        ranks = env.num_local_ranks
        there_is = memory_of_this_machine() // ranks
        location = "on this machine" if ranks == 1 else f"on this machine for each of its {ranks} ranks"
    check_memory(config, env.world_size, there_is, location, vocab_size)


def machine_notes(config: RunConfig, env: LaunchEnvironment, group: dist.ProcessGroup | None) -> list[str]:
    """Notes on settings of any node that make the run slow; the same on all ranks. A collective call.

    Args:
        config: the resolved configuration.
        env: this process's place.
        group: all ranks; None for a single one.
    """
    parallel = config.parallel
    over_tcp = parallel.distributed_backend == "gloo" or os.environ.get("NCCL_IB_DISABLE") == "1"
    crosses_nodes = parallel.pipeline_model_parallel_size > 1 and env.num_local_ranks < env.world_size
    try:
        starts_slowly = over_tcp and crosses_nodes and SLOW_START.read_text().strip() == "1"
    except OSError:  # not Linux, or hidden in a container
        starts_slowly = False
    if not any_rank(group, starts_slowly):
        return []
    return [
        "TCP connections start slowly again after each pause, so on slow links messages between pipeline stages take "
        "longer; to change this, run `sysctl -w net.ipv4.tcp_slow_start_after_idle=0` as root on all nodes"
    ]
