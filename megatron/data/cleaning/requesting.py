"""Page downloads with bounded size and time, without private networks, and according to robots.txt."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from protego import Protego
from requests.adapters import HTTPAdapter
from requests.utils import requote_uri
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NameResolutionError

from megatron.base.errors import UserError
from megatron.data.cleaning.fetching import Limits, Page, host_of

_ROBOTS_BYTES = 500_000
"""Maximum bytes of a robots.txt; the remainder is ignored."""
_ROBOTS_KEPT, _ROBOTS_BYTES_KEPT = 10_000, 20_000_000
"""Maximum number of sites with cached rules, and total bytes of their files."""
_REDIRECTIONS = 5
_KINDS = ("text/html", "application/xhtml+xml", "text/plain")
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
        with suppress(ValueError):  # not an address but a name
            _check_public(self._dns_host)
        try:
            connection = super()._new_conn()
        except NameResolutionError as error:
            if isinstance(error.__cause__, socket.gaierror) and error.__cause__.errno != socket.EAI_AGAIN:
                raise _Refused("could not be reached") from error
            raise
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


class _Adapter(HTTPAdapter):
    """HTTP adapter that enforces the limits; proxies must block private hosts themselves."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(pool_connections=limits.connections, pool_maxsize=1, max_retries=0)
        if not limits.private:
            self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}


def _as_nobody(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Disables the credentials that requests would read from the user's files."""
    return request


class Fetcher:
    """Thread-safe page fetcher, without cookies and without following redirections.

    Raises:
        UserError: when urllib3 is too old.
    """

    def __init__(self, limits: Limits) -> None:
        if not hasattr(urllib3.HTTPResponse, "read1"):
            raise UserError(f"urllib3 {urllib3.__version__} is too old: pip install 'urllib3>=2.2'")
        self.limits = limits
        self._session = requests.Session()
        self._session.headers["User-Agent"] = limits.agent
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _Adapter(limits))
        self._robots: dict[str, tuple[Protego, int]] = {}
        self._robots_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, url: str) -> Page:
        """Fetches a page; failures are reported in the result."""
        try:
            if self.limits.robots and not self._rules_of(url).can_fetch(url, self.limits.agent):
                return Page(url, failed="refused by robots.txt")
            with self._get(url) as response:
                target = self._target(url, response)
                if target:
                    return Page(url, failed="redirected too often", then=target)
                if response.status_code != 200:
                    retry_url = url if response.status_code in _BUSY else ""
                    return Page(url, failed=f"answered with status {response.status_code}", then=retry_url)
                kind = response.headers.get("Content-Type", "text/html").split(";")[0].strip().lower()
                if kind not in _KINDS:
                    return Page(url, failed="no text but another kind of file")
                body = self._body(response, self.limits.max_bytes)
                if len(body) > self.limits.max_bytes:
                    return Page(url, failed="too large")
                return Page(url, body, kind)
        except _Refused as reason:
            return Page(url, failed=str(reason))
        except _Busy as reason:
            return Page(url, failed=str(reason), then=url)
        except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
            return Page(url, failed="timed out", then=url if isinstance(error, requests.ConnectTimeout) else "")
        except Exception as error:  # sites may trigger any error of requests, urllib3, http.client, idna or ipaddress
            return Page(url, failed="could not be reached", then=url if _may_come_back(error) else "")

    def _get(self, url: str) -> requests.Response:
        """Sends a request; the body is not read yet. Session.get would read the bodies of redirections of any size."""
        request = self._session.prepare_request(requests.Request("GET", url, auth=_as_nobody))
        settings: dict[str, Any] = {}  # from the environment: proxies, certificates
        settings.update(self._session.merge_environment_settings(str(request.url), {}, True, None, None))
        return self._session.get_adapter(str(request.url)).send(request, timeout=self.limits.timeout, **settings)

    def _target(self, url: str, response: requests.Response) -> str:
        """Target URL of a redirection; empty for other responses."""
        target = self._session.get_redirect_target(response)
        return urljoin(url, requote_uri(target)) if target else ""

    def _body(self, response: requests.Response, most: int) -> bytes:
        """Reads the decompressed body within bounded time; stops once it is longer than ``most`` bytes."""
        deadline = time.monotonic() + 3 * self.limits.timeout
        chunks, size = [], 0
        # read1 returns the available bytes, so that slow sites do not evade the deadline.
        while size <= most and (chunk := response.raw.read1(1 << 16, decode_content=True)):
            size += len(chunk)
            chunks.append(chunk)
            if time.monotonic() > deadline:
                raise _Refused("timed out")
        return b"".join(chunks)

    def _rules_of(self, url: str) -> Protego:
        """Robots rules of the URL's site: a missing file allows everything; a server error makes the site busy."""
        site = f"{urlsplit(url).scheme}://{host_of(url)}"
        rules_entry = self._robots.get(site)
        if rules_entry is None:
            text = self._ask_for_rules(site + "/robots.txt")
            rules_entry = Protego.parse(text), len(text)
            with self._lock:
                if site not in self._robots:  # an abandoned request may have added it
                    self._robots[site] = rules_entry
                    self._robots_bytes += rules_entry[1]
                while len(self._robots) > _ROBOTS_KEPT or self._robots_bytes > _ROBOTS_BYTES_KEPT:
                    self._robots_bytes -= self._robots.pop(next(iter(self._robots)))[1]
        return rules_entry[0]

    def _ask_for_rules(self, url: str) -> str:
        for _ in range(1 + _REDIRECTIONS):
            with self._get(url) as response:
                status = response.status_code
                if status >= 500 or status in _BUSY:
                    raise _Busy(f"robots.txt: answered with status {status}")
                if status == 200:
                    text = self._body(response, _ROBOTS_BYTES)[:_ROBOTS_BYTES].decode("utf-8", "replace")
                    return text.removeprefix("\ufeff")
                url = self._target(url, response)
            if not url:
                break
        return ""


def _may_come_back(error: Exception) -> bool:
    return isinstance(error, requests.ConnectionError) and not isinstance(error, requests.exceptions.SSLError)
