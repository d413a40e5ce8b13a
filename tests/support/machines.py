"""Simulated machines: two network namespaces joined by a wire (Linux, root), and a machine's name as Debian resolves
it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.hosts import LabError, check_permission
from benchmarks.lab.removal import kill
from tests.support.cleanup import die_with_parent
from tests.support.cli import REPO

_LISTENING = "0A"  # state of a socket in /proc/net/tcp


def require_laboratory() -> None:
    """Skip a test, or a module that calls this at its top, where the laboratory's hosts cannot be made."""
    try:
        check_permission()
    except LabError as problem:
        pytest.skip(str(problem), allow_module_level=True)


@dataclass(frozen=True)
class Machine:
    """A network namespace with a loopback interface, and an address of its own."""

    name: str
    address: str

    def start(
        self, words: Sequence[object], out: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts Python there, its output going to a file."""
        with out.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, *map(str, words)],
                cwd=REPO,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )

    def listening(self) -> set[tuple[str, int]]:
        """Address and port of each socket of this machine that takes TCP connections."""
        files = ("/proc/net/tcp", "/proc/net/tcp6")
        text = subprocess.run(["ip", "netns", "exec", self.name, "cat", *files], capture_output=True, text=True).stdout
        rows = [line.split() for line in text.splitlines()]
        return {_address(row[1]) for row in rows if len(row) > 3 and row[3] == _LISTENING}


def _address(text: str) -> tuple[str, int]:
    """Address and port as Linux writes them: hexadecimal, each 32 bits of the address in the machine's byte order."""
    digits, _, port = text.partition(":")
    words = [int(digits[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(digits), 8)]
    packed = b"".join(words)
    address = IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """The machines; processes that still run there at the end are killed.

    The first name resolves to its address, the second to a loopback address.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip, to make network namespaces")
    run = uuid.uuid4().hex[:6]
    machines = [Machine(f"mcc{run}{side}", f"10.213.7.{side}") for side in (1, 2)]
    hosts = [Path("/etc/netns") / machine.name for machine in machines]
    try:
        for machine, folder in zip(machines, hosts, strict=True):
            _ip("netns", "add", machine.name)
            folder.mkdir(parents=True)
            # ``ip netns exec`` puts it in the place of /etc/hosts.
            address = "127.0.1.1" if machine is machines[1] else machine.address  # as in Debian
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
        first, second = machines
        wire = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.name)
        _ip("-n", first.name, *wire)
        for machine in machines:
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", machine.name, "link", "set", link, "up")
        yield first, second
    finally:
        for machine, folder in zip(machines, hosts, strict=True):
            with suppress(subprocess.CalledProcessError, OSError):
                kill([machine.name])
                _ip("netns", "delete", machine.name)
            shutil.rmtree(folder, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the name "debian" the address that Debian gives a machine's own name."""
    lookup = socket.getaddrinfo

    def getaddrinfo(host: str, *words: Any, **options: Any) -> Any:
        return lookup("127.0.1.1" if host == "debian" else host, *words, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
