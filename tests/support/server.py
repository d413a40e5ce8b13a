"""A generation server in a process of its own, and a client of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.cli import REPO
from tests.support.warm import INTERPRETER


class Client:
    """Speaks to the server."""

    def __init__(self, process: subprocess.Popen[str], host: str, port: int) -> None:
        self.process, self.host, self.port = process, host, port

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON (or text) of an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, json.loads(text) if "json" in reply.getheader("content-type", "") else text

    def put(self, **body: object) -> tuple[int, Any]:
        return self.ask("PUT", "/api", body)

    def complete(self, **body: object) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", body)


@contextmanager
def serving(saved: Path, *flags: str, ranks: int = 1) -> Iterator[Client]:
    """A running server."""
    script = ["tools/run_text_generation_server.py", "--load", str(saved), "--port", "0", *flags]
    launcher = [INTERPRETER, "tools/launch.py", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [*(launcher if ranks > 1 else [sys.executable]), *script]
    process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(m for line in process.stdout if (m := re.search(r"at http://([\d.]+):(\d+)", line)))
        yield Client(process, address[1], int(address[2]))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
