"""From the launcher's environment to a process group, and back."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.topology.errors import CommunicationError, LaunchError
from megatron.topology.group import first_line

_NUMBER = re.compile(r"\s*-?[0-9]{1,18}\s*", re.ASCII)
_MOST_LOCAL = 1 << 16
"""Processes on a machine."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """What the launcher (torchrun, srun, or none) told this process."""

    rank: int
    world_size: int
    local_rank: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise LaunchError(f"WORLD_SIZE is {self.world_size}; start at least one process")
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"RANK is {self.rank}, but the ranks of WORLD_SIZE {self.world_size} are 0 to {self.world_size - 1}; "
                "correct what the launcher sets"
            )
        if not 0 <= self.local_rank < _MOST_LOCAL:
            raise LaunchError(
                f"LOCAL_RANK (or --local-rank) is {self.local_rank}, not the number of a process on its machine"
            )

    @staticmethod
    def read(local_rank: int | None = None) -> LaunchEnvironment:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK, else the variables of srun, else a single process.

        Args:
            local_rank: the launcher's ``--local-rank``, used where LOCAL_RANK is not set.

        Raises:
            LaunchError: when a variable is not a number, or not one of a rank.
        """
        world_size = _number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
        rank = _number("RANK", "SLURM_PROCID") if world_size is not None else None
        local = _number("LOCAL_RANK")
        if local is None:
            local = _number("SLURM_LOCALID") if local_rank is None else local_rank
        if world_size is not None:
            _check_port()
        return LaunchEnvironment(rank or 0, 1 if world_size is None else world_size, local or 0)


def _number(*names: str) -> int | None:
    """The first of some environment variables that is set; None when none is."""
    for name in names:
        text = os.environ.get(name)
        if text is not None:
            if not _NUMBER.fullmatch(text):
                raise LaunchError(f"the environment variable {name} is {text[:60]!r}, not a number; correct it")
            return int(text)
    return None


def _check_port() -> None:
    """Raises LaunchError when MASTER_PORT is set to what is no port."""
    port = _number("MASTER_PORT")
    if port is not None and not 0 <= port < 1 << 16:
        raise LaunchError(f"the environment variable MASTER_PORT is {port}; ports are 0 to 65535")


def pick_device(backend: str, local_rank: int) -> torch.device:
    """The CUDA device of the local rank for nccl, else the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def meet(env: LaunchEnvironment, timeout_minutes: float) -> dist.Store:
    """The store by which the ranks meet, at MASTER_ADDR and MASTER_PORT. Rank 0 keeps it unless the launcher does.

    Raises:
        CommunicationError: when nobody keeps it there.
    """
    os.environ.setdefault("MASTER_ADDR", _first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost")))
    os.environ.setdefault("MASTER_PORT", "6000")
    launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            env.world_size,
            is_master=env.rank == 0 and not launchers,
            timeout=timedelta(minutes=timeout_minutes),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(env, error) from error
    # torchrun's store outlives the workers. After a restart the new ones would find what the old ones left there,
    # and wait for processes that are gone.
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def init_process_group(
    env: LaunchEnvironment, backend: str, timeout_minutes: float, store: dist.Store | None = None
) -> None:
    """Joins torch's default process group.

    Args:
        env: this process's place.
        backend: of the group.
        timeout_minutes: of the meeting, and of every collective afterwards.
        store: what ``meet`` returned, where it has been called.

    Raises:
        CommunicationError: when the rendezvous fails.
    """
    timeout = timedelta(minutes=timeout_minutes)
    store = meet(env, timeout_minutes) if store is None else store
    try:
        dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(env, error) from error


def _cannot_join(env: LaunchEnvironment, error: Exception) -> CommunicationError:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return CommunicationError(
        f"rank {env.rank} of {env.world_size} cannot join the process group at {where} "
        f"(MASTER_ADDR, MASTER_PORT): {first_line(error)}"
    )


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as ``rack[07-09,12]-a,login``."""
    match = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def shutdown() -> None:
    """Leaves the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()
