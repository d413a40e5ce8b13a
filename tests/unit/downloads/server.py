"""A web server of published files, which fails as it is told."""

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
    """The name that git has for a content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Published:
    """The files of a server, and how it behaves; tests change both.

    Attributes:
        files: contents by path.
        asked: paths asked for, each with its Range and If-Range.
        breaks: bytes of an answer after which the connection ends, for each of the next answers with a path.
        statuses: statuses of the next answers with a path.
        raw: whole answers by path, in place of files.
        ranges, tags, lengths: whether it knows of parts, names versions, and says how long a file is.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.breaks: dict[str, list[int]] = {}
        self.statuses: dict[str, list[int]] = {}
        self.raw: dict[str, bytes] = {}
        self.ranges = self.tags = self.lengths = True
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
        where = f"/huggingface.co/api/{kind}/{repository}/tree/main" + (f"/{folder}" if folder else "")
        self.files[where] = json.dumps(entries).encode()


@contextmanager
def serving() -> Iterator[Published]:
    """A server on this machine."""
    published = Published()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            published.asked.append((self.path, self.headers["Range"], self.headers["If-Range"]))
            waiting = published.statuses.get(self.path)
            if self.path in published.raw:
                self.wfile.write(published.raw[self.path])
                self.close_connection = True
            elif waiting:
                self._answer(waiting.pop(0), b"", {"Retry-After": "3"})
            elif self.path not in published.files:
                self._answer(404, b"", {})
            else:
                self._send(published.files[self.path])

        def _send(self, data: bytes) -> None:
            tag = f'"{git_name(data)}"'
            headers = {"ETag": tag} if published.tags else {}
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
            same = self.headers["If-Range"] in (None, tag)
            if wanted is None or not published.ranges or not same:
                self._answer(200, data, headers)
                return
            begin = int(wanted[1])
            if begin >= len(data):
                self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            extent = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self._answer(206, data[begin:], {**headers, "Content-Range": extent})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            following = published.files.get(f"{self.path}#next")
            if following is not None:
                self.send_header("Link", f'<https://huggingface.co{following.decode()}>; rel="next"')
            for name, value in headers.items():
                self.send_header(name, value)
            if published.lengths:
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            breaks = published.breaks.get(self.path)
            self.wfile.write(body[: breaks.pop(0)] if breaks and body else body)
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
