"""Limits of page fetching, and its results; without the libraries that fetch."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from megatron.base.option import option

UNREACHED = ("could not be reached", "timed out", "of a host that does not answer")
"""Failure reasons of pages whose host, or the network, is down."""

RECORDED_LIMITS = ("max_bytes", "robots", "private")
"""Fields of ``Limits`` that affect which pages are downloaded."""


@dataclass(frozen=True)
class Limits:
    """Limits of page fetching; each field is a flag."""

    # Each connection takes two threads and one or two of typically 1,024 open files.
    connections: int = option(32, "concurrent connections", metavar="N", minimum=1, maximum=400)
    delay: float = option(1.0, "seconds between pages of a host", metavar="S", minimum=0, maximum=3600)
    timeout: float = option(
        10.0, "seconds of silence; a page may take three times as long", metavar="S", minimum=0.1, maximum=3600
    )
    max_bytes: int = option(5_000_000, "maximum size of a page", metavar="N", minimum=1, maximum=1_000_000_000)
    agent: str = option("megatron-cc", "name sent to the sites", flag="user-agent", metavar="NAME")
    robots: bool = option(True, "ignore robots.txt", flag="ignore-robots", off_switch=True)
    private: bool = option(
        False, "also fetch from hosts of this machine and of private networks", flag="allow-private-hosts"
    )

    @property
    def patience(self) -> float:
        """Total timeout of a request in seconds, name resolution and slow headers included."""
        return 12 * self.timeout


@dataclass(frozen=True)
class Page:
    """Result of a request.

    Args:
        url: requested URL.
        body: bytes of the page; empty after a failure.
        media_type: media type of the body.
        failed: short failure reason for the counts; empty on success.
        retry: whether another request may succeed.
    """

    url: str
    body: bytes = b""
    media_type: str = ""
    failed: str = ""
    retry: bool = False


def host_of(url: str) -> str:
    """Name and port of a URL's host; empty if it has none."""
    try:
        return urlsplit(url).netloc.rsplit("@", 1)[-1].lower()
    except ValueError:
        return ""
