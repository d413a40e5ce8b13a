"""Fixtures of the cleaning tests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.openwebtext.site import Site
from tests.unit.openwebtext.support import Refusal


@pytest.fixture(autouse=True)
def without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the proxies of the user's environment."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Call a tool that must fail, and return its only error line."""

    def call(tool: Any, flags: list[str]) -> str:
        capsys.readouterr()
        assert tool.main(flags) == 2
        error_lines = capsys.readouterr().err.splitlines()
        assert sum("error" in line for line in error_lines) == 1
        return error_lines[-1]

    return call


@pytest.fixture
def site() -> Iterator[str]:
    """Port of a site that listens on every loopback address."""
    Site.requests, Site.at_once, Site.most_at_once = Counter(), Counter(), Counter()
    server = ThreadingHTTPServer(("0.0.0.0", 0), Site)
    server.daemon_threads = True
    interval = 0.01  # seconds between checks for its end
    threading.Thread(target=server.serve_forever, args=(interval,), daemon=True).start()
    yield str(server.server_address[1])
    server.shutdown()
    server.server_close()
