"""The rendezvous of launchers: numbering of machines, and the meeting point of their ranks.

torch's rendezvous listens at every address of a machine, and one kind of it unpickles received data. This rendezvous
listens at a single address: on one machine at a loopback address, on several at that of the first machine's name. It
reads JSON.
"""

from __future__ import annotations

import argparse
import errno
import json
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron.base.errors import first_line
from megatron.distributed.errors import CommunicationError
from megatron.distributed.store import check_reachable, connect_store, serve_store
from megatron.distributed.work import Caller

LOOPBACK = "127.0.0.1"
STATIC, BY_ARRIVAL = "static", "c10d"
"""torchrun's names of backends: machines with fixed numbers, and machines numbered once all have arrived."""
_PORTS = {STATIC: 29500, BY_ARRIVAL: 29400}
"""torchrun's default ports."""
_SECONDS = 600.0
"""Maximum time until all machines have arrived."""
_SERVED_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)
"""Errors that mean that another launcher serves the store: on another machine, or earlier on this machine."""


@dataclass(frozen=True)
class RendezvousAddress:
    """The address where launchers meet.

    Args:
        host, port: address of the store; port 0 takes a free port.
        nodes: number of launchers.
        node: number of this launcher; None if launchers are numbered once all have arrived.
        seconds: maximum time until all have arrived.
    """

    host: str
    port: int
    nodes: int = 1
    node: int | None = 0
    seconds: float = _SECONDS


def rendezvous_address(arguments: argparse.Namespace) -> RendezvousAddress:
    """The address given by torchrun's flags.

    Raises:
        ValueError: when the flags give no address; with a one-line reason.
    """
    backend = BY_ARRIVAL if arguments.standalone else arguments.rdzv_backend
    if backend not in _PORTS:
        raise ValueError(f"--rdzv-backend {backend}: give {STATIC} or {BY_ARRIVAL}; others unpickle what they are sent")
    least, nodes = run.parse_min_max_nnodes(arguments.nnodes)
    if least != nodes:
        raise ValueError(
            f"--nnodes {arguments.nnodes}: give one number; to go on with more or fewer machines, start the run again "
            "with another number"
        )
    host, port = arguments.master_addr, arguments.master_port or _PORTS[backend]
    if arguments.rdzv_endpoint and not arguments.standalone:
        try:
            host, port = parse_rendezvous_endpoint(arguments.rdzv_endpoint, port)
        except ValueError as error:
            raise ValueError(f"--rdzv-endpoint {arguments.rdzv_endpoint}: give HOST:PORT") from error
    if not 0 < port <= 65535:
        raise ValueError(f"{host}:{port}: give a port from 1 to 65535; on one machine leave it out for a free one")
    if nodes > 1:
        return RendezvousAddress(host, port, nodes, arguments.node_rank if backend == STATIC else None)
    has_port = not arguments.standalone and (arguments.master_port or arguments.rdzv_endpoint)
    return RendezvousAddress(LOOPBACK, port if has_port else 0)


class Rendezvous(RendezvousHandler):
    """A launcher's part in the rendezvous.

    Args:
        name: torch's name for this kind of rendezvous.
        address: address of the rendezvous.
        run_id: name of the run; launchers of different runs do not meet.
        begin: called each time before ranks are started, in the main thread; it may raise.
    """

    def __init__(self, name: str, address: RendezvousAddress, run_id: str, begin: Callable[[], None]) -> None:
        self._name = name
        self._address = address
        self._run_id = run_id
        self._begin = begin
        self._store: dist.TCPStore | None = None
        self._node = 0

    def get_backend(self) -> str:
        return self._name

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store, serves = self._open()
            if serves and self._address.nodes > 1:
                check_reachable(self._address.host, "give the address that others use (--master-addr, --rdzv-endpoint)")
            self._node = self._number_machine(dist.PrefixStore(self._run_id, self._store), serves)
        self._begin()
        store_info = RendezvousStoreInfo(self._address.host, self._store.port)
        return RendezvousInfo(dist.PrefixStore(self._run_id, self._store), self._node, self._address.nodes, store_info)

    def _open(self) -> tuple[dist.TCPStore, bool]:
        """Serve the store or connect to it; the second value is True if it serves."""
        address = self._address
        if not address.node:
            try:
                return serve_store(address.host, address.port, address.seconds), True
            except OSError as error:
                if address.node is not None or error.errno not in _SERVED_ELSEWHERE:
                    hint = ""
                    if error.errno == errno.EADDRNOTAVAIL:
                        hint = "; --master-addr is an address of the machine of --node-rank 0"
                    raise CommunicationError(
                        f"cannot listen at {address.host}:{address.port}: {first_line(error)}{hint}"
                    ) from error
        try:
            return connect_store(address.host, address.port, address.seconds), False
        except (OSError, RuntimeError, ValueError) as error:
            raise CommunicationError(
                f"the first machine does not answer at {address.host}:{address.port}: {first_line(error)}"
            ) from error

    def _number_machine(self, store: dist.Store, serves: bool) -> int:
        """Wait until all machines have arrived, and return the number of this machine."""
        address = self._address
        if address.nodes == 1:
            return 0
        number = store.add("arrivals", 1) - 1 if address.node is None else address.node
        entry = json.dumps([not serves, socket.gethostname(), number, uuid.uuid4().hex])
        if number >= address.nodes:
            raise CommunicationError(f"more than {address.nodes} machines have come (--nnodes)")
        if store.compare_set(f"machine/{number}", "", entry).decode() != entry:
            raise CommunicationError(f"another launcher was started with --node-rank {number}")
        keys = [f"machine/{each}" for each in range(address.nodes)]
        try:
            # In a thread, as a signal does not interrupt torch's wait.
            Caller("rendezvous").start(lambda: store.wait(keys, timedelta(seconds=address.seconds))).result()
        except RuntimeError as error:
            missing = ", ".join(str(n) for n, key in enumerate(keys) if not store.check([key]))
            raise CommunicationError(
                f"machines {missing} of {address.nodes} have not come in {address.seconds:g} s"
            ) from error
        if address.node is not None:
            return number
        return sorted(json.loads(store.get(key)) for key in keys).index(json.loads(entry))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def use_rendezvous(arguments: argparse.Namespace, begin: Callable[[], None]) -> None:
    """Make torch's launcher use this rendezvous: change its flags. ``begin`` is the argument of ``Rendezvous``.

    Raises:
        ValueError: as ``rendezvous_address``.
    """
    address = rendezvous_address(arguments)

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        seconds = parameters.get_as_int("timeout") or parameters.get_as_int("join_timeout") or _SECONDS
        return Rendezvous(name, replace(address, seconds=float(seconds)), parameters.run_id, begin)

    name = f"megatron-{uuid.uuid4().hex}"
    rendezvous_handler_registry.register(name, create)
    arguments.standalone, arguments.rdzv_backend, arguments.rdzv_endpoint = (
        False,
        name,
        f"{address.host}:{address.port}",
    )
