"""Joining and leaving the process group, from the launcher's environment."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.base.addresses import is_loopback
from megatron.base.errors import UserError, first_line
from megatron.distributed.errors import CommunicationError
from megatron.distributed.store import (
    OWN_INTERFACE,
    check_reachable,
    connect_store,
    interface_to,
    loopback_interface,
    serve_store,
)

_NUMBER = re.compile(r"\s*-?[0-9]{1,18}\s*", re.ASCII)
_MAX_LOCAL_RANKS = 1 << 16
"""Upper bound on the processes of a machine."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The environment that the launcher (torchrun, srun, or none) gave this process.

    ``node`` is equal only on ranks of the same machine: torchrun's or srun's number of it, else the index of the block
    of LOCAL_WORLD_SIZE ranks, else the machine's name.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None
    node: str = ""

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are known to be on this machine."""
        return self.local_world_size == self.world_size

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks on this machine, as far as the launcher says."""
        return min(max(self.local_world_size or 1, 1), self.world_size)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UserError(f"WORLD_SIZE is {self.world_size}; start at least one process")
        if not 0 <= self.rank < self.world_size:
            raise UserError(
                f"RANK is {self.rank}, but the ranks of WORLD_SIZE {self.world_size} are 0 to {self.world_size - 1}; "
                "correct what the launcher sets"
            )
        if not 0 <= self.local_rank < _MAX_LOCAL_RANKS:
            raise UserError(
                f"LOCAL_RANK (or --local-rank) is {self.local_rank}, not the number of a process on its machine"
            )

    @staticmethod
    def read(local_rank: int | None = None) -> LaunchEnvironment:
        """Read RANK, WORLD_SIZE and LOCAL_RANK, else the variables of srun, else a single process.

        Args:
            local_rank: the launcher's ``--local-rank``, used where LOCAL_RANK is not set.

        Raises:
            UserError: when a variable is not a number, or not a valid rank.
        """
        world_size = _read_number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
        rank = _read_number("RANK", "SLURM_PROCID") if world_size is not None else None
        local = _read_number("LOCAL_RANK")
        if local is None:
            local = _read_number("SLURM_LOCALID") if local_rank is None else local_rank
        if world_size is not None:
            port = _read_number("MASTER_PORT")
            if port is not None and not 0 <= port < 1 << 16:
                raise UserError(f"the environment variable MASTER_PORT is {port}; ports are 0 to 65535")
        local_world_size = _read_number("LOCAL_WORLD_SIZE")
        if local_world_size is None and "RANK" not in os.environ and _read_number("SLURM_STEP_NUM_NODES") == 1:
            local_world_size = world_size
        # srun's variables count only for ranks that srun itself started.
        number = _read_number("GROUP_RANK") if "RANK" in os.environ else _read_number("SLURM_NODEID")
        if number is None and local_world_size is not None and local_world_size > 0:
            number = (rank or 0) // local_world_size
        node = socket.gethostname() if number is None else str(number)
        return LaunchEnvironment(rank or 0, 1 if world_size is None else world_size, local or 0, local_world_size, node)


def _read_number(*names: str) -> int | None:
    """Read the first of the environment variables that is set; None if none is."""
    for name in names:
        text = os.environ.get(name)
        if text is not None:
            if not _NUMBER.fullmatch(text):
                raise UserError(f"the environment variable {name} is {text[:60]!r}, not a number; correct it")
            return int(text)
    return None


QUEUES = 32
"""Maximum number of hardware queues of a process on a CUDA device."""
_ENOUGH_QUEUES = 16
"""More than the number of streams: a compute stream, and a stream per communicator of a rank."""


def open_queues() -> str | None:
    """Give each stream of this process a separate hardware queue; must be called before CUDA is used.

    CUDA's default of 8 queues is fewer than a rank's streams. A message that waits for an earlier message of its stream
    blocks other streams' work in the same queue, which can be the work that its peer is waiting for.

    Returns:
        A note for the user when the environment asks for too few.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    requested_queues = int(value) if value is not None and _NUMBER.fullmatch(value) else None
    if requested_queues is not None and requested_queues >= _ENOUGH_QUEUES:
        return None
    os.environ[name] = str(QUEUES)
    return (
        None if value is None else f"{name} is {QUEUES} here, not {value}: messages need hardware queues of their own"
    )


def pick_device(backend: str, local_rank: int) -> torch.device:
    """Pick the CUDA device of the local rank for nccl, else the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_rendezvous_store(env: LaunchEnvironment, timeout_minutes: float) -> dist.Store:
    """Open the store of the ranks at MASTER_ADDR and MASTER_PORT; rank 0 serves it unless the launcher does.

    Raises:
        UserError: when ranks of other machines cannot reach it there.
        CommunicationError: when nothing serves it there.
    """
    # The first host of Slurm's node list, such as ``rack[07-09,12]-a,login``.
    nodes = os.environ.get("SLURM_STEP_NODELIST", "localhost")
    match = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\]([^,\[]*))?", nodes)
    first_host = "".join(text or "" for text in match.groups()) if match else nodes
    master = os.environ.setdefault("MASTER_ADDR", first_host)
    port = os.environ.setdefault("MASTER_PORT", "6000")
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not launcher_serves and not env.one_machine:
        check_reachable(
            master,
            "set MASTER_ADDR to the address that others use, or LOCAL_WORLD_SIZE to the number of ranks where all are "
            "on this machine",
        )
    open_store = serve_store if env.rank == 0 and not launcher_serves else connect_store
    try:
        store = open_store(master, int(port), 60 * timeout_minutes)
    except (OSError, RuntimeError, ValueError) as error:
        raise _join_error(env, error) from error
    # torchrun's store outlives the workers. After a restart the new workers would find the old workers' keys there,
    # and wait for processes that are gone.
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def init_process_group(
    env: LaunchEnvironment, backend: str, timeout_minutes: float, store: dist.Store | None = None
) -> None:
    """Join torch's default process group.

    Args:
        env: environment of this process.
        backend: backend of the process group.
        timeout_minutes: timeout of the rendezvous, and of every later collective.
        store: the store that ``open_rendezvous_store`` returned, if it was called.

    Raises:
        UserError: when ranks of other machines cannot reach this rank's store.
        CommunicationError: when the rendezvous fails.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if env.one_machine:
        # Binds gloo and NCCL to the loopback interface, unless the user has chosen another interface.
        interface = loopback_interface()
        if interface is not None:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    store = open_rendezvous_store(env, timeout_minutes) if store is None else store
    if not env.one_machine and "GLOO_SOCKET_IFNAME" not in os.environ:
        # By default, gloo listens at the address of this machine's name, which Debian makes a loopback address.
        try:
            addresses = {str(address[0]) for *_, address in socket.getaddrinfo(socket.gethostname(), None)}
        except OSError:
            addresses = set()
        if all(map(is_loopback, addresses)) and (interface := interface_to(os.environ["MASTER_ADDR"])) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ[OWN_INTERFACE] = interface
    try:
        dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise _join_error(env, error) from error


def _join_error(env: LaunchEnvironment, error: Exception) -> CommunicationError:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return CommunicationError(
        f"rank {env.rank} of {env.world_size} cannot join the process group at {address} "
        f"(MASTER_ADDR, MASTER_PORT): {first_line(error)}"
    )


def write_error_file(text: str, printed: bool = True) -> None:
    """Write the reason of this rank's failure to torchrun's error file, for the launcher to report.

    Args:
        text: the reason; only its first line is used.
        printed: whether this rank has already printed it, so that tools/launch.py need not.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        line = (text.splitlines() or [""])[0]
        extra = {"py_callstack": line, "timestamp": str(int(time.time())), "printed": printed}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": line, "extraInfo": extra}}, file)


def shutdown() -> None:
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()
