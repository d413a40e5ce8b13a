"""A store that listens at a single address."""

from __future__ import annotations

import errno
import socket

import pytest

from megatron.distributed.store import serve_store


def test_a_port_in_use_is_an_error_even_if_another_address_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have several addresses: some ranks would meet another run at the first address."""
    with socket.create_server(("127.0.0.1", 0)) as other_run:
        port = other_run.getsockname()[1]
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **options: addresses)
        with pytest.raises(OSError, match=r"in use") as caught:
            serve_store("localhost", port, 5.0)
        assert caught.value.errno == errno.EADDRINUSE


def test_an_address_of_another_machine_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("203.0.113.7", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **options: addresses)
    assert serve_store("name", 0, 5.0).host == "127.0.0.1"
