"""Counters of the kernel: what a connection and its interface have sent."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from megatron.distributed import interfaces
from megatron.distributed.interfaces import SentCounts, read_sent


def _difference(before: SentCounts, after: SentCounts) -> tuple[int, int]:
    connections = sum(n - before.connections.get(name, 0) for name, n in after.connections.items())
    return connections, after.interfaces["lo"] - before.interfaces["lo"]


def test_connections_count_this_process_to_the_byte_and_loopback_at_least_as_much() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = read_sent()
            count = 5_000_001
            thread = threading.Thread(target=sender.sendall, args=(b"x" * count,))
            thread.start()
            remaining = count
            while remaining:
                remaining -= len(receiver.recv(1 << 20))
            thread.join()
            time.sleep(0.1)
            connections, loopback = _difference(before, read_sent())
    assert connections == count
    assert loopback >= count  # other programs send, too


def test_interfaces_on_top_of_others_and_headers_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "1 1 0 0 0 0 0 0"
    counters = tmp_path / "dev"
    counters.write_text(
        f"head\nhead\n    lo: {columns} 1000000 10 0 0 0 0 0 0\n  eth0: {columns} 2000000 20 0 0 0 0 0 0\n"
        f" bond0:{columns} 2000000 20 0 0 0 0 0 0\n"
    )
    (tmp_path / "bond0" / "lower_eth0").mkdir(parents=True)
    monkeypatch.setattr(interfaces, "_COUNTERS", counters)
    monkeypatch.setattr(interfaces, "_INTERFACES", tmp_path)
    assert read_sent().interfaces == {"lo": 1_000_000 - 10 * 52, "eth0": 2_000_000 - 20 * 66}
    counters.unlink()
    with pytest.raises(OSError, match="No such file"):
        read_sent()
