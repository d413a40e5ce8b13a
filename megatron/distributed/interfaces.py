"""Bytes that this machine's network interfaces and this process's TCP connections have sent, without headers.

Interfaces count the bytes of all programs; the kernel's counters of connections give this process's part.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_COUNTERS = Path("/proc/self/net/dev")
_INTERFACES = Path("/sys/class/net")
_LOOPBACK = "lo"
SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
"""Whether a TCP connection that was idle shrinks its window again, as it does by default on Linux."""
_SENT_BYTES, _SENT_PACKETS = 8, 9
"""Columns of the counters."""
TCP_HEADER, ETHERNET_HEADER = 52, 14
"""Bytes of the headers of IPv4 and TCP with time stamps, and of Ethernet, which loopback does not count."""
_TCP_INFO_BYTES, _BYTES_SENT_OFFSET = 216, 200
"""Size of Linux's ``tcp_info``, and the place of its fields ``bytes_sent`` and ``bytes_retrans``."""


@dataclass(frozen=True)
class SentCounts:
    """Counters of this network namespace and this process.

    Args:
        namespace: name that no other namespace has, on this or any other machine.
        interfaces: bytes sent by each interface since it exists, without headers.
        connections: bytes sent by each open TCP connection of this process; empty where Linux does not report them.
    """

    namespace: str
    interfaces: Mapping[str, int]
    connections: Mapping[str, int]


def read_sent() -> SentCounts:
    """Read the counters of this process's connections, and of all interfaces that are not stacked on others (bonds,
    bridges, VLANs), since the underlying interfaces count the same bytes.

    Raises:
        OSError: when the interfaces' counters cannot be read.
    """
    interfaces = {}
    for line in _COUNTERS.read_text().splitlines()[2:]:
        name, _, columns = line.partition(":")
        name, numbers = name.strip(), columns.split()
        if any((_INTERFACES / name).glob("lower_*")):
            continue
        header = TCP_HEADER + (0 if name == _LOOPBACK else ETHERNET_HEADER)
        interfaces[name] = int(numbers[_SENT_BYTES]) - header * int(numbers[_SENT_PACKETS])
    connections = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not TCP
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(info) == _TCP_INFO_BYTES:  # older kernels have fewer fields
                count, retransmitted = struct.unpack_from("QQ", info, _BYTES_SENT_OFFSET)
                connections[name] = count - retransmitted
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return SentCounts(f"{boot} {os.readlink('/proc/self/ns/net')}", interfaces, connections)
