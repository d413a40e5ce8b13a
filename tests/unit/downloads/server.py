"""A web server of published files, with failures on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def git_name(data: bytes) -> str:
    """Git's name of a content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Published:
    """The files of a server, and how it behaves; tests change both.

    Attributes:
        files: contents by path.
        requests: paths asked for, without queries, each with its Range.
        breaks: bytes of an answer after which the connection ends, for each of the next answers with a path.
        statuses: statuses of the next answers with a path.
        ranges, lengths: whether it knows of parts, and says how long a file is.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.breaks: dict[str, list[int]] = {}
        self.statuses: dict[str, list[int]] = {}
        self.ranges = self.lengths = True
        self.address = ""

    def add_hub(self, kind: str, repository: str, files: dict[str, bytes], folder: str = "", large: str = "") -> None:
        """Files of a repository on the hub, and the list of a folder; those that end in ``large`` are large files."""
        begin = "" if kind == "models" else f"{kind}/"
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "more", "oid": "0", "size": 0}]
        for path, data in files.items():
            self.files[f"/huggingface.co/{begin}{repository}/resolve/main/{path}"] = data
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_name(data)}
            if large and path.endswith(large):
                digest = hashlib.sha256(data).hexdigest()
                entry |= {"oid": "0" * 40, "lfs": {"oid": digest, "size": len(data), "pointerSize": 134}}
            entries.append(entry)
        path = f"/huggingface.co/api/{kind}/{repository}/tree/main" + (f"/{folder}" if folder else "")
        self.files[path] = json.dumps(entries).encode()


@contextmanager
def serving() -> Iterator[Published]:
    """A server on this machine."""
    published = Published()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            published.requests.append((path, self.headers["Range"]))
            if published.statuses.get(path):
                self._answer(published.statuses[path].pop(0), b"", {})
            elif path in published.files:
                self._send(path, published.files[path])
            else:
                self._answer(404, b"", {})

        def _send(self, path: str, data: bytes) -> None:
            byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
            begin = int(byte_range[1]) if byte_range and published.ranges else 0
            if begin > len(data) - 1 and byte_range:
                self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            extent = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
            breaks = published.breaks.get(path)
            self._answer(206 if begin else 200, data[begin:], extent, breaks.pop(0) if breaks else None)

        def _answer(self, status: int, body: bytes, headers: dict[str, str], end: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if published.lengths:
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body[:end])
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    published.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield published
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
