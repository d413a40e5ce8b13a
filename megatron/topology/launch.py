"""From the launcher's environment to a process group, and back."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.topology.errors import CommunicationError
from megatron.topology.group import first_line


@dataclass(frozen=True)
class LaunchEnvironment:
    """What the launcher (torchrun, srun, or none) told this process."""

    rank: int
    world_size: int
    local_rank: int

    @staticmethod
    def read(local_rank: int | None = None) -> LaunchEnvironment:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK, else the variables of srun, else a single process.

        Args:
            local_rank: the launcher's ``--local-rank``, used where LOCAL_RANK is not set.

        Raises:
            CommunicationError: when a variable is not a number.
        """
        world_size = _number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
        rank = _number("RANK", "SLURM_PROCID") if world_size is not None else None
        local = _number("LOCAL_RANK")
        if local is None:
            local = _number("SLURM_LOCALID") if local_rank is None else local_rank
        return LaunchEnvironment(rank or 0, 1 if world_size is None else world_size, local or 0)


def _number(*names: str) -> int | None:
    """The first of some environment variables that is set; None when none is."""
    for name in names:
        text = os.environ.get(name)
        if text is not None:
            try:
                return int(text)
            except ValueError as error:
                raise CommunicationError(f"the environment variable {name} is {text!r}, not a number") from error
    return None


def pick_device(backend: str, local_rank: int) -> torch.device:
    """The CUDA device of the local rank for nccl, else the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def init_process_group(env: LaunchEnvironment, backend: str, timeout_minutes: float) -> None:
    """Joins torch's default process group.

    Raises:
        CommunicationError: when the rendezvous fails.
    """
    os.environ.setdefault("MASTER_ADDR", _first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost")))
    os.environ.setdefault("MASTER_PORT", "6000")
    timeout = timedelta(minutes=timeout_minutes)
    try:
        dist.init_process_group(
            backend,
            store=_store_of_this_attempt(timeout),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CommunicationError(
            f"rank {env.rank} of {env.world_size} cannot join the process group at {where} "
            f"(MASTER_ADDR, MASTER_PORT): {first_line(error)}"
        ) from error


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as ``rack[07-09,12]-a,login``."""
    match = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _store_of_this_attempt(timeout: timedelta) -> dist.Store | None:
    """The launcher's store, with the names of this attempt kept apart; None where rank 0 is to keep the store.

    torchrun's store outlives the workers. After a restart the new ones would find the addresses that the old ones
    left there, and wait for processes that are gone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def shutdown() -> None:
    """Leaves the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()
