"""A web site for tests of fetchers."""

from __future__ import annotations

import gzip
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

STORY = (
    "The old house by the river had been empty for many years when family number {0} came. They painted door {0}, "
    "mended roof {0} and planted {0} apple trees, and in the evening they sat outside and listened to the water. "
)
ROBOTS = "User-agent: *\nDisallow: /secret\nAllow: /secret/open\nDisallow: /*.pdf$\n"


def page(number: int, repeat: int = 6) -> str:
    story = "".join(f"<p>{STORY.format(f'{number}-{paragraph}')}</p>" for paragraph in range(repeat))
    return f"<html><head><title>t</title></head><body><nav>Home About</nav><article>{story}</article></body></html>"


class Site(BaseHTTPRequestHandler):
    """Web site whose paths name their behavior."""

    requests: ClassVar[Counter[str]] = Counter()
    at_once: ClassVar[Counter[str]] = Counter()
    most_at_once: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "text/html", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        host = self.headers["Host"]
        with Site.lock:
            Site.requests[self.path] += 1
            Site.at_once[host] += 1
            Site.most_at_once[host] = max(Site.most_at_once[host], Site.at_once[host])
        try:
            self.respond()
        except OSError:
            pass  # the fetcher has closed the connection, as it should
        finally:
            with Site.lock:
                Site.at_once[host] -= 1

    def respond(self) -> None:
        name = self.path.strip("/").split("/")[0]
        if self.path == "/robots.txt":
            self.answer(200, ROBOTS.encode(), "text/plain")
        elif name.startswith("story"):
            self.answer(200, page(int(name[5:])).encode())
        elif name == "plain":
            self.answer(200, "Ä plain text.".encode(), "text/plain; charset=utf-8")
        elif name == "packed":
            self.answer(200, gzip.compress(page(77).encode()), Content_Encoding="gzip")
        elif name == "bomb":
            self.answer(200, gzip.compress(bytes(50_000_000)), Content_Encoding="gzip")
        elif name == "picture":
            self.answer(200, b"\x89PNG", "image/png")
        elif name == "moved":
            self.answer(302, b"", Location="/story5")
        elif name == "circle":
            self.answer(302, b"", Location="/circle")
        elif name == "away":
            self.answer(302, b"", Location=f"http://127.0.0.77:{self.headers['Host'].split(':')[1]}{self.path[5:]}")
        elif name == "heavy":
            self.send_response(302)
            self.send_header("Location", "/story6")
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"x" * 100_000)
        elif name == "file":
            self.answer(302, b"", Location="file:///etc/passwd")
        elif name == "silent":
            time.sleep(1.0)
        elif name == "drip":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            for _ in range(600):
                self.wfile.write(b"x" * 70_000)
                time.sleep(0.1)
        elif name == "trickle":
            self.answer(200, b"", Content_Length="1000")
            for _ in range(600):
                self.wfile.write(b"x")
                time.sleep(0.1)
        elif name == "headers":
            for _ in range(600):
                self.wfile.write(b"HTTP/1.0 200 OK\r\n" if _ == 0 else b"X: y\r\n"[_ % 6 :][:1])
                time.sleep(0.1)
        elif name == "stuck":
            time.sleep(120)
        elif name == "busy":
            self.answer(503 if Site.requests[self.path] < 2 else 200, page(9).encode())
        elif name == "empty":
            self.answer(200, b"<html><body></body></html>")
        elif name == "garbage":
            self.answer(200, bytes(range(256)) * 50)
        else:
            self.answer(404, b"not here")
