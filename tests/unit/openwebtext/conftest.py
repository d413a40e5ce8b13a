"""Fixtures of tests that fetch pages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from tests.unit.openwebtext.site import Site


@pytest.fixture(autouse=True)
def without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the proxies of the user's environment."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")


@pytest.fixture
def site() -> Iterator[str]:
    """Port of a site that listens on every loopback address."""
    Site.requests, Site.at_once, Site.most_at_once = Counter(), Counter(), Counter()
    server = ThreadingHTTPServer(("0.0.0.0", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, args=(0.01,), daemon=True
    )  # the interval of its check for the end
    thread.start()
    yield str(server.server_address[1])
    server.shutdown()
    server.server_close()
