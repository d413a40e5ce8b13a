"""Pages come within bounds or with a reason, from public hosts, one request at a time per host."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.openwebtext.site import Site
from tools.openwebtext.cleaning.fetching import Fetcher, fetch_all
from tools.openwebtext.cleaning.pages import Limits, Page, host_of

PATIENT = Limits(delay=0.0, timeout=20.0, private=True, max_bytes=1_000_000)
HASTY = replace(PATIENT, timeout=0.4)


FAILURES = {
    "": ("/story1", "/plain", "/packed", "/moved", "/busy", "/heavy", "/away/story3"),
    "too large": ("/bomb",),
    "no text but another kind of file": ("/picture",),
    "redirected too often": ("/circle",),
    "refused by robots.txt": ("/away/secret", "/secret/story1", "/a/b.pdf"),
    "could not be reached": ("/file",),
    "timed out": ("/silent", "/drip", "/trickle", "/headers"),
    "answered with status 404": ("/nothing", "/secret/open", "/a/b.pdf?x"),
}


@pytest.mark.parametrize(("path", "failed"), [(path, reason) for reason in FAILURES for path in FAILURES[reason]])
def test_a_page_or_the_reason_of_its_failure_is_returned(path: str, failed: str, site: str) -> None:
    limits = replace(HASTY, max_bytes=50_000_000) if failed == "timed out" else PATIENT
    url = f"http://127.0.0.1:{site}{path}"
    start = time.monotonic()
    (page,) = fetch_all([url], Fetcher(limits), 4, 0.0, min(limits.patience, 2.0) if path == "/headers" else 100.0)
    assert time.monotonic() - start < 30  # some of these pages take a minute
    assert page.url == url
    assert page.failed == failed
    assert bool(page.body) == (not failed)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "[::1]", "0.0.0.0"])
def test_hosts_of_private_networks_are_refused(host: str, site: str) -> None:
    assert Fetcher(Limits(timeout=0.5))(f"http://{host}:{site}/story1").failed == "of a private network"
    assert not Site.requests


def test_a_name_with_a_changing_address_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is public when only looked up, and an address of this machine for the connection."""

    def look_up(host: str, port: int | None, *_: object, **__: object) -> list[Any]:
        address = "93.184.215.14" if port is None else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for limits in (Limits(timeout=5.0), Limits(timeout=5.0, robots=False)):
        assert Fetcher(limits)(f"http://changes.example.org:{site}/story1").failed == "of a private network"
    assert Fetcher(limits)(f"https://changes.example.org:{site}/story1").failed == "of a private network"
    assert not Site.requests


def test_names_that_do_not_exist_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "as on the network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    url = "http://no-such-host.example.org/"
    assert Fetcher(Limits())(url) == Page(url, failed="could not be reached")


@pytest.mark.parametrize(
    "url",
    ["http://", "http://[", "nonsense", "http://no-such-host.invalid/", "http://a:b/", "ftp://x/y", "http://\ud800/"],
)
def test_malformed_urls_fail_alone(url: str) -> None:
    assert Fetcher(HASTY)(url).failed == "could not be reached"


def test_one_request_at_a_time_per_host(site: str) -> None:
    urls = [f"http://127.0.0.{1 + number % 4}:{site}/story{number}" for number in range(40)]
    pages = list(fetch_all(urls, Fetcher(PATIENT), connections=16, delay=0.0))
    assert sorted(page.url for page in pages) == sorted(urls)
    assert not any(page.failed for page in pages)
    assert set(Site.most_at_once.values()) == {1}
    assert Site.requests["/robots.txt"] == 4


def test_pages_are_retried_and_silent_hosts_dropped() -> None:
    requests: Counter[str] = Counter()

    def fetch(url: str) -> Page:
        requests[url] += 1
        if "busy" in url:
            return Page(url, failed="answered with status 503", retry=True)
        if "dead" in url:
            return Page(url, failed="could not be reached", retry=True)
        if "stuck" in url:
            time.sleep(20)
        return Page(url, b"x")

    urls = [f"http://{host}/{number}" for host in ("busy", "dead", "stuck", "alive") for number in range(10)]
    start = time.monotonic()
    pages = list(fetch_all(urls, fetch, connections=8, delay=0.0, patience=0.3))
    assert time.monotonic() - start < 15
    assert sorted(page.url for page in pages) == sorted(urls)
    assert {requests[url] for url in urls if "busy" in url} == {1 + 2}
    assert sum(requests[url] for url in urls if "dead" in url) == 6
    assert Counter((host_of(page.url), page.failed) for page in pages) == {
        ("busy", "answered with status 503"): 10,
        ("dead", "could not be reached"): 2,
        ("dead", "of a host that does not answer"): 8,
        ("stuck", "timed out"): 6,
        ("stuck", "of a host that does not answer"): 4,
        ("alive", ""): 10,
    }


def test_pausing_hosts_leave_the_connections_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host's first page is fetched while other hosts pause, here until all first pages are there."""
    running, most_at_once = [0], [0]
    pages: list[str] = []
    lock = threading.Lock()
    has_all_first = threading.Event()

    def pause(seconds: float) -> None:
        if seconds and not has_all_first.wait(20.0):
            has_all_first.set()  # so that the test ends, and fails

    monkeypatch.setattr("tools.openwebtext.cleaning.fetching.time", SimpleNamespace(sleep=pause))

    def fetch(url: str) -> Page:
        with lock:
            running[0] += 1
            most_at_once[0] = max(most_at_once[0], running[0])
            pages.append(url[-1])
            if pages.count("0") == 30:
                has_all_first.set()
        time.sleep(0.005)
        with lock:
            running[0] -= 1
        return Page(url, b"x")

    list(fetch_all([f"http://h{host}/{page}" for host in range(30) for page in range(2)], fetch, 4, delay=1.0))
    assert pages == ["0"] * 30 + ["1"] * 30
    assert most_at_once[0] <= 4


def test_there_is_a_pause_between_two_pages_of_a_host() -> None:
    moments: dict[str, list[float]] = {"a": [], "b": []}

    def fetch(url: str) -> Page:
        moments[host_of(url)].append(time.monotonic())
        return Page(url, b"x")

    list(fetch_all([f"http://{host}/{number}" for number in range(4) for host in "ab"], fetch, 2, delay=0.1))
    for times in moments.values():
        assert all(later - earlier >= 0.1 for earlier, later in pairwise(times))
