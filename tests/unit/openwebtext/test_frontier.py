"""Hosts take turns, and those that are silent are given up."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron.data.cleaning.fetching import Frontier, Page, fetch_all, host_of


@given(
    hosts=st.lists(st.integers(0, 5), max_size=60),
    window=st.integers(1, 20),
    connections=st.integers(1, 6),
    seconds=st.lists(st.floats(0.01, 3), min_size=1, max_size=7),
)
def test_hosts_take_turns(hosts: list[int], window: int, connections: int, seconds: list[float]) -> None:
    """In simulated time: every URL once, one request at a time to a host, pauses kept, and nobody idles for nothing."""
    delay = 1.0
    urls = [f"http://h{host}/{number}" for number, host in enumerate(hosts)]
    frontier = Frontier(urls, delay, window)
    now, given_out = 0.0, []
    running: dict[str, float] = {}
    ended: dict[str, float] = {}
    while True:
        while len(running) < connections and (quest := frontier.take(now)) is not None:
            url = quest.url
            assert host_of(url) not in map(host_of, running)
            assert now >= ended.get(host_of(url), -delay) + delay
            given_out.append(url)
            running[url] = now + seconds[len(given_out) % len(seconds)]
        pause = frontier.wait(now) if len(running) < connections else None
        if not running and pause is None:
            break
        moments = [*running.values(), *([] if pause is None else [now + pause])]
        now = min(moments)
        for url in [url for url, end in running.items() if end <= now]:
            del running[url]
            ended[host_of(url)] = now
            frontier.release(url, now)
    assert sorted(given_out) == sorted(urls)


def test_a_page_is_asked_for_a_few_times() -> None:
    """Also by a host that answers otherwise."""
    asked: Counter[str] = Counter()

    def fetch(url: str) -> Page:
        asked[url] += 1
        if "busy" in url and asked[url] < 20:
            return Page(url, failed="answered with status 503", then=url)
        if "away" in url and len(asked) < 40:
            return Page(url, failed="redirected too often", then=f"{url}/on")
        return Page(url, b"x")

    urls = ["http://h/busy", *(f"http://h/{number}" for number in range(9)), "http://h/away"]
    found = list(fetch_all(urls, fetch, connections=4, delay=0.0))
    assert {page.url: page.failed for page in found} == dict.fromkeys(urls, "") | {
        "http://h/busy": "answered with status 503", "http://h/away": "redirected too often",
    }  # fmt: skip
    assert asked["http://h/busy"] == 1 + 2
    assert sum(times for url, times in asked.items() if "away" in url) == 1 + 5


def test_silent_hosts_are_given_up() -> None:
    asked: Counter[str] = Counter()

    def fetch(url: str) -> Page:
        asked[url] += 1
        if "dead" in url:
            return Page(url, failed="could not be reached", then=url)
        if "stuck" in url:
            time.sleep(20)
        return Page(url, b"x")

    urls = [f"http://{host}/{number}" for host in ("dead", "stuck", "alive") for number in range(50)]
    start = time.monotonic()
    found = list(fetch_all(urls, fetch, connections=8, delay=0.0, patience=0.5))
    assert time.monotonic() - start < 15
    assert sorted(page.url for page in found) == sorted(urls)
    assert sum(asked[url] for url in urls if "dead" in url) == 6
    assert max(asked[url] for url in urls) <= 3
    assert Counter((host_of(page.url), page.failed) for page in found) == {
        ("dead", "of a host that does not answer"): 50,
        ("stuck", "timed out"): 6,
        ("stuck", "of a host that does not answer"): 44,
        ("alive", ""): 50,
    }  # fmt: skip
