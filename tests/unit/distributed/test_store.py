"""A store that is bound to one address."""

from __future__ import annotations

import errno
import socket

import pytest

from megatron.distributed.store import serve_store


def test_a_port_in_use_is_an_error_and_no_reason_to_serve_at_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may stand for several addresses: at the second one, some ranks would meet another run at the first."""
    with socket.create_server(("127.0.0.1", 0)) as other_run:
        port = other_run.getsockname()[1]
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **options: addresses)
        with pytest.raises(OSError, match=r"in use") as caught:
            serve_store("localhost", port, 5.0)
        assert caught.value.errno == errno.EADDRINUSE


def test_an_address_that_this_machine_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("203.0.113.7", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **options: addresses)
    assert serve_store("name", 0, 5.0).host == "127.0.0.1"
