"""The meeting place of islands: its address, unresponsive listeners, and clients that do not read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.diloco.groups import CPU, make_island_group
from megatron.diloco.membership import Islands
from megatron.diloco.store import _PREFIX, IslandStore, serve
from megatron.distributed.errors import CommunicationError
from megatron.distributed.store import OWN_INTERFACE
from tests.unit.diloco.support import each

_VALUE_BYTES = 1 << 20


def test_the_meeting_place_listens_only_at_its_address() -> None:
    stores = [serve("127.0.0.2", 0) for _ in range(5)]
    for store in stores:
        with socket.create_connection(("127.0.0.2", store.port), 5):
            pass
    # Other processes may listen at some of these ports of other addresses, but hardly at all five.
    assert any(all(_refuses(other, store.port) for other in ("127.0.0.1", "127.0.0.3")) for store in stores)
    store = stores[0]
    IslandStore("127.0.0.2", store.port, 10.0).put("key", 1)
    with pytest.raises(CommunicationError, match=rf"cannot be at 127\.0\.0\.2:{store.port}: .*in use"):
        serve("127.0.0.2", store.port)
    with pytest.raises(CommunicationError, match=r"cannot be at 192\.0\.2\.1:0: .*assign requested address"):
        serve("192.0.2.1", 0)  # reserved for documentation
    with pytest.raises(CommunicationError, match=r"cannot be at no-such-host\.invalid:0: "):
        serve("no-such-host.invalid", 0)


def _refuses(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def _listening() -> set[str]:
    """IPv4 addresses at which this process listens."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    addresses = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in addresses}


def test_islands_connect_by_the_address_that_reaches_the_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by this machine's name. GLOO_SOCKET_IFNAME has priority; for a place at every address gloo chooses."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = serve("127.0.0.4", 0)
    store_0, store_1 = (IslandStore("127.0.0.4", store.port, 10.0) for _ in range(2))
    assert store_0.own_address() == "127.0.0.1"  # the kernel's choice for loopback addresses
    monkeypatch.setattr(IslandStore, "own_address", lambda self: "127.0.0.5")
    before = _listening()
    pair = [Islands(at, number, 2, 2, 5.0, 5.0, None) for number, at in enumerate((store_0, store_1))]
    groups = each(pair, lambda i: i.make_group((0, 1), "pair", 5.0))
    assert _listening() - before == {"127.0.0.5"}
    assert [group.size for group in groups] == [2, 2]
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert store_0.own_address() is None
    monkeypatch.setenv(OWN_INTERFACE, "eth7")  # not set by the user
    assert store_0.own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    everywhere = serve("0.0.0.0", 0)
    assert IslandStore("0.0.0.0", everywhere.port, 10.0).own_address() is None


def test_an_unresponsive_listener_is_an_error_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would wait forever. A line names the address."""
    monkeypatch.setattr("megatron.distributed.store._SPARE_SECONDS", 0.2)
    monkeypatch.setattr("megatron.distributed.store.QUIET_SECONDS", 0.2)
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, began = listener.getsockname()[1], time.monotonic()
        with pytest.raises(CommunicationError, match=rf"127\.0\.0\.1:{port} .* not answered .* within 0.8 s: another"):
            IslandStore("127.0.0.1", port, 0.8, lines.append)
        assert time.monotonic() - began < 15
    assert lines == [f"waiting for the islands' meeting place at 127.0.0.1:{port}, 0.8 s at most"]


@pytest.mark.slow
def test_a_silent_meeting_place_is_an_error_after_the_time_limit() -> None:
    """Its process is stopped, so that connections stay open without answers."""
    with _served_elsewhere(1.0) as (server, store):
        store.put("key", 1)
        os.kill(server, signal.SIGSTOP)
        # The signal is delivered some time after kill() has returned; until then the server still answers.
        os.waitid(os.P_PID, server, os.WSTOPPED)
        began = time.monotonic()
        with pytest.raises(CommunicationError, match="has not answered for 1 s: the launcher that serves it hangs"):
            store.get("key")
        with pytest.raises(CommunicationError, match=r"islands \(0, 1\) do not meet: "):
            make_island_group(dist.PrefixStore("x", store.box), (0, 1), 0, "islands", 1.0, None, CPU)
        assert time.monotonic() - began < 25


@pytest.mark.slow
def test_a_client_that_never_reads_is_disconnected() -> None:
    """It requests a value of 1 MiB again and again; other clients are served meanwhile."""
    with _served_elsewhere(20.0) as (server, store):
        store.put("key", "x" * _VALUE_BYTES)
        before = _resident(server)
        # Requests of torch's store: a greeting, and many reads of a value.
        key = f"/{_PREFIX}/key".encode()
        with socket.create_connection(store._address) as greedy:
            greedy.settimeout(20.0)
            greedy.sendall(b"\0" + (0x3C85F7CE).to_bytes(4, "little"))
            most = _send_repeatedly(greedy, b"\3" + len(key).to_bytes(8, "little") + key, server, store) - before
        assert most > 32 * _VALUE_BYTES, "answers do not accumulate, so the test proves nothing"
        deadline = time.monotonic() + 20
        while _resident(server) - before > 32 * _VALUE_BYTES:
            assert time.monotonic() < deadline, "the answers are kept"
            time.sleep(0.05)


@contextmanager
def _served_elsewhere(seconds: float) -> Iterator[tuple[int, IslandStore]]:
    """A meeting place of another process: the id of that process, and a client with a time limit."""
    code = "from megatron.diloco.store import serve; import time; s = serve('127.0.0.1', 0); "
    code += "print(s.port, flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.pid, IslandStore("127.0.0.1", int(server.stdout.readline()), seconds)
        finally:
            server.kill()


def _send_repeatedly(connection: socket.socket, request: bytes, server: int, store: IslandStore) -> int:
    """Sends requests until the server disconnects; returns its largest resident memory in bytes.

    At most 1,000 requests per second, which bounds the memory that answers take until then.
    """
    most = 0
    for number in range(6000):
        try:
            connection.sendall(request)
        except (BrokenPipeError, ConnectionResetError):
            return most
        most = max(most, _resident(server))
        if number % 100 == 0:
            assert store.get("key") == "x" * _VALUE_BYTES
        time.sleep(0.001)
    pytest.fail("the client is still connected")


def _resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_meeting_place_may_have_an_ipv6_address() -> None:
    store = serve("::1", 0)
    client = IslandStore("::1", store.port, 10.0)
    client.put("key", 1)
    assert client.get("key") == 1
    assert client.address == f"[::1]:{store.port}"
