"""Page downloads with requests: bounded size and time, public hosts only, and according to robots.txt."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from queue import Empty, Queue, SimpleQueue
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from protego import Protego
from requests.adapters import HTTPAdapter
from requests.utils import requote_uri
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NameResolutionError
from urllib3.exceptions import TimeoutError as ReadTimeout

from tools.openwebtext.cleaning.pages import UNREACHED, Limits, Page, host_of

_MAX_UNANSWERED = 6
"""Consecutive pages without an answer after which a host's remaining pages are skipped."""
_HOSTS_PER_CONNECTION, _MAX_HOSTS = 8, 1000
"""Hosts that take turns: per connection, and in total."""
_REDIRECTIONS, _RETRIES = 5, 2
_MAX_ROBOTS_BYTES = 500_000
_MEDIA_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_BUSY = (429, 502, 503, 504)


class _Refused(Exception):
    """Raised with the reason for a page that must not be fetched."""


class _Busy(Exception):
    """Raised with the reason for a page that may be available later."""


def _check_public(address: str) -> None:
    if not ipaddress.ip_address(address.split("%")[0]).is_global:
        raise _Refused("of a private network")


class _Connection(HTTPConnection):
    """Connection to public hosts only. Checks the peer address, since a name may resolve differently each time."""

    def _new_conn(self) -> socket.socket:
        with suppress(ValueError):  # a name instead of an address
            _check_public(self._dns_host)
        connection = super()._new_conn()
        try:
            _check_public(connection.getpeername()[0])
        except BaseException:
            connection.close()
            raise
        return connection


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class Fetcher:
    """Thread-safe page fetcher without cookies and credentials; proxies must block private hosts themselves."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._session = requests.Session()
        self._session.headers["User-Agent"] = limits.agent
        for scheme in ("http://", "https://"):
            adapter = HTTPAdapter(pool_connections=limits.connections, pool_maxsize=1)
            if not limits.private:
                adapter.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
            self._session.mount(scheme, adapter)
        self._rules = lru_cache(1000)(self._load_rules)

    def __call__(self, url: str) -> Page:
        """Fetch a page; failures are reported in the result."""
        target = url
        try:
            for _ in range(1 + _REDIRECTIONS):
                site = f"{urlsplit(target).scheme}://{host_of(target)}"
                if self.limits.robots and not self._rules(site).can_fetch(target, self.limits.agent):
                    return Page(url, failed="refused by robots.txt")
                with self._get(target) as response:
                    target = self._redirect_target(target, response)
                    if not target:
                        if response.status_code != 200:
                            reason = f"answered with status {response.status_code}"
                            return Page(url, failed=reason, retry=response.status_code in _BUSY)
                        media_type = response.headers.get("Content-Type", "text/html").split(";")[0].strip().lower()
                        if media_type not in _MEDIA_TYPES:
                            return Page(url, failed="no text but another kind of file")
                        body = self._read_body(response, self.limits.max_bytes)
                        return (
                            Page(url, failed="too large")
                            if len(body) > self.limits.max_bytes
                            else Page(url, body, media_type)
                        )
            return Page(url, failed="redirected too often")
        except _Refused as refused:
            return Page(url, failed=str(refused))
        except _Busy as busy:
            return Page(url, failed=str(busy), retry=True)
        except Exception as error:  # sites may trigger any error of requests, urllib3, http.client, idna or ipaddress
            timed_out = isinstance(error, (requests.Timeout, ReadTimeout))
            is_unknown_name = isinstance(getattr(next(iter(error.args), None), "reason", None), NameResolutionError)
            permanent = is_unknown_name or isinstance(error, requests.exceptions.SSLError)
            retry = isinstance(error, requests.ConnectionError) and not permanent
            return Page(url, failed="timed out" if timed_out else "could not be reached", retry=retry)

    def _get(self, url: str) -> requests.Response:
        """Send a request; the body is not read yet. Session.get would read the bodies of redirections of any size."""
        request = self._session.prepare_request(requests.Request("GET", url, auth=lambda prepared: prepared))
        settings: dict[str, Any] = {}  # from the environment: proxies, certificates
        settings.update(self._session.merge_environment_settings(str(request.url), {}, True, None, None))
        return self._session.get_adapter(str(request.url)).send(request, timeout=self.limits.timeout, **settings)

    def _redirect_target(self, url: str, response: requests.Response) -> str:
        """Target URL of a redirection; empty for other responses."""
        target = self._session.get_redirect_target(response)
        return urljoin(url, requote_uri(target)) if target else ""

    def _read_body(self, response: requests.Response, max_bytes: int) -> bytes:
        """Read the decompressed body within bounded time; stop once it is longer than ``max_bytes``."""
        deadline = time.monotonic() + 3 * self.limits.timeout
        body = bytearray()
        # read1 returns the available bytes, so that slow sites do not evade the deadline.
        while len(body) <= max_bytes and (chunk := response.raw.read1(1 << 16, decode_content=True)):
            body += chunk
            if time.monotonic() > deadline:
                raise _Refused("timed out")
        return bytes(body)

    def _load_rules(self, site: str) -> Protego:
        """Robots rules of a site: a missing file allows everything; a server error makes the site busy."""
        url = site + "/robots.txt"
        for _ in range(1 + _REDIRECTIONS):
            with self._get(url) as response:
                if response.status_code >= 500 or response.status_code in _BUSY:
                    raise _Busy(f"robots.txt: answered with status {response.status_code}")
                if response.status_code == 200:
                    body = self._read_body(response, _MAX_ROBOTS_BYTES)[:_MAX_ROBOTS_BYTES]
                    return Protego.parse(body.decode("utf-8-sig", "replace"))
                url = self._redirect_target(url, response)
            if not url:
                break
        return Protego.parse("")


def _fetch_in_time(fetch: Callable[[str], Page], url: str, patience: float) -> Page:
    """Fetch a page in a separate thread, which is abandoned after ``patience`` seconds."""
    answers: SimpleQueue[Page] = SimpleQueue()
    threading.Thread(target=lambda: answers.put(fetch(url)), daemon=True).start()
    try:
        return answers.get(timeout=patience)
    except Empty:
        return Page(url, failed="timed out")


def fetch_all(
    urls: Iterable[str], fetch: Callable[[str], Page], connections: int, delay: float, patience: float = 120.0
) -> Iterator[Page]:
    """Fetch pages in parallel, those of a host one after another; yield them in order of completion.

    Args:
        urls: URLs, all of which are held in memory.
        fetch: thread-safe function that fetches a URL and reports failures in its result.
        connections: maximum number of concurrent requests.
        delay: seconds between two requests to a host.
        patience: seconds after which a request is abandoned.
    """
    urls_by_host: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        urls_by_host[host_of(url)].append(url)
    hosts: SimpleQueue[list[str]] = SimpleQueue()
    for host_urls in sorted(urls_by_host.values(), key=len, reverse=True):  # those that take longest first
        hosts.put(host_urls)
    pages: Queue[Page] = Queue(2 * connections)
    slots = threading.Semaphore(connections)

    def fetch_hosts() -> None:
        while True:
            try:
                host_urls = hosts.get_nowait()
            except Empty:
                return
            pause, num_unanswered = 0.0, 0
            for url in host_urls:
                for attempt in range(1 + _RETRIES):
                    if num_unanswered == _MAX_UNANSWERED:
                        pages.put(Page(url, failed="of a host that does not answer"))
                        break
                    time.sleep(pause)
                    with slots:  # until the page is taken, so that few pages are in memory
                        page, pause = _fetch_in_time(fetch, url, patience), delay
                        num_unanswered = num_unanswered + 1 if page.failed in UNREACHED else 0
                        is_last = not page.retry or attempt == _RETRIES
                        if is_last:
                            pages.put(page)
                    if is_last:
                        break

    # More threads than connections, since most of them pause; daemon threads, so that an interrupted program ends at
    # once.
    for _ in range(min(_HOSTS_PER_CONNECTION * connections, _MAX_HOSTS, len(urls_by_host))):
        threading.Thread(target=fetch_hosts, daemon=True).start()
    for _ in range(sum(map(len, urls_by_host.values()))):
        yield pages.get()
