"""Rendezvous stores: each listens at a single address of its machine."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.base.addresses import is_loopback
from megatron.base.errors import UserError
from megatron.distributed.work import Caller

OWN_INTERFACE = "MEGATRON_INTERFACE"
"""Environment variable with the value of GLOO_SOCKET_IFNAME, if this program and not the user has chosen that value."""
_SIOCGIFADDR = 0x8915  # from linux/sockios.h
QUIET_SECONDS = 2.0
"""Time after which a waiting process prints a note."""
_SPARE_SECONDS = 2.0
"""Addition to the time limit, since torch's own timeout gives a better message and should come first."""


def serve_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    """Serve a store at an address of this machine; port 0 takes a free port.

    Args:
        host: name or address; of a name's addresses, the first that belongs to this machine is used.
        port: its port.
        seconds: timeout of the store's calls.

    Raises:
        OSError: when the address is not this machine's, or the port is in use.
        RuntimeError: when the store does not start.
    """
    problem = OSError(f"{host} has no address")
    for family, *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        try:
            listener = socket.create_server(target[:2], family=family, backlog=socket.SOMAXCONN)
            break
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # others would connect to the program that listens here
                raise
            problem = error
    else:
        raise problem
    with listener:
        address, bound = listener.getsockname()[:2]
        # By default, the store listens at every address.
        store = dist.TCPStore(
            address,
            bound,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=listener.fileno(),
        )
        listener.detach()
        return store


def connect_store(host: str, port: int, seconds: float, on_delay: Callable[[], None] = lambda: None) -> dist.TCPStore:
    """Connect to a store, once it is served.

    Args:
        host, port: address of the store.
        seconds: longest time until the store answers, and timeout of its calls.
        on_delay: called once if connecting takes more than a moment.

    Raises:
        RuntimeError, ValueError: when nothing listens there within the time.
        TimeoutError: when the listener does not answer.
    """
    timeout = timedelta(seconds=seconds)

    def connect() -> dist.TCPStore:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    # torch waits forever for the first answer of a listener that accepts the connection.
    future = Caller("store").start(connect)
    if not wait([future], min(seconds, QUIET_SECONDS)).done:
        on_delay()
    if not wait([future], seconds + _SPARE_SECONDS).done:
        raise TimeoutError(
            f"what listens there has not answered as a rendezvous does in {seconds + _SPARE_SECONDS:.0f} s: another "
            "service, or a process that hangs?"
        )
    return future.result()


def check_reachable(host: str, remedy: str) -> None:
    """Check that the name under which this machine serves a store to other machines is not at a loopback address.

    Debian's /etc/hosts gives a machine's own name the address 127.0.1.1. A host written as a loopback address or as
    localhost is accepted: several machines may be simulated on this machine.

    Raises:
        UserError: when other machines cannot reach it; the message ends with ``remedy``, the setting to change.
    """
    addresses: list[Any] = []
    with suppress(OSError):  # serving the store reports an unknown name
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    if addresses and is_loopback(addresses[0][-1][0]) and not is_loopback(host):
        raise UserError(f"{host} is a loopback address on this machine, where no other machine reaches it; {remedy}")


def own_address(host: str) -> tuple[socket.AddressFamily, str]:
    """The address from which this machine connects to another machine."""
    problem: OSError = OSError(errno.EHOSTUNREACH, f"no address for {host}")
    for family, kind, _, _, target in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                return family, str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem


def interface_to(host: str) -> str | None:
    """The name of the interface by which this machine reaches another machine; None if unknown.

    Supports only IPv4 addresses, on Linux.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        _, local_address = own_address(host)
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == local_address:
                    return name
    return None


def loopback_interface() -> str | None:
    """The name of this machine's loopback interface, if it has a usual name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
