"""Scheduling of page requests: round-robin over hosts with pauses, redirections and retries."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from megatron.base.option import option

WINDOW = 10_000
"""URLs held in memory; URLs of ready hosts go first."""

UNREACHED = ("could not be reached", "timed out", "of a host that does not answer")
"""Failure reasons of pages whose host, or the network, is down."""

OF_PAGES = ("max_bytes", "robots", "private")
"""Fields of ``Limits`` that affect which pages are downloaded."""

_HOPELESS = 6
"""Consecutive requests without an answer after which a host's remaining pages are skipped."""


@dataclass(frozen=True)
class Limits:
    """Limits of page fetching; each field is a flag."""

    # Each connection takes a thread and one or two of typically 1,024 open files.
    connections: int = option(32, "connections at once", metavar="N", minimum=1, maximum=400)
    delay: float = option(1.0, "seconds between pages of a host", metavar="S", minimum=0, maximum=3600)
    timeout: float = option(
        10.0, "seconds of silence; a page may take three times as long", metavar="S", minimum=0.1, maximum=3600
    )
    max_bytes: int = option(5_000_000, "bytes of a page, at most", metavar="N", minimum=1, maximum=1_000_000_000)
    agent: str = option("megatron-cc", "told to the sites", flag="user-agent", metavar="NAME")
    robots: bool = option(True, "do not ask for robots.txt", flag="ignore-robots", off_switch=True)
    private: bool = option(
        False, "fetch from hosts of this machine and its own network, too", flag="allow-private-hosts"
    )

    @property
    def of_pages(self) -> list[int]:
        """Values of the ``OF_PAGES`` fields."""
        return [getattr(self, name) for name in OF_PAGES]

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
        kind: media type of the body.
        failed: short failure reason for the counts; empty on success.
        then: next URL to request: the target of a redirection, or the same URL for a retry.
    """

    url: str
    body: bytes = b""
    kind: str = ""
    failed: str = ""
    then: str = ""

    @property
    def answered(self) -> bool:
        """Whether the host answered with more than a busy status."""
        return self.then != self.url and self.failed not in UNREACHED


def host_of(url: str) -> str:
    """Name and port of a URL's host; empty if it has none."""
    try:
        return urlsplit(url).netloc.rsplit("@", 1)[-1].lower()
    except ValueError:
        return ""


@dataclass(eq=False)
class Quest:
    """A pending page.

    Args:
        begun: original URL.
        url: next URL to request: the original, or the target of a redirection.
        redirections, retries: remaining redirections and retries.
    """

    begun: str
    url: str
    redirections: int = 5
    retries: int = 2

    def goes_on(self, page: Page) -> bool:
        """Updates the quest after an answer; returns whether to send another request."""
        if not page.then:
            return False
        if page.then == self.url:
            self.retries -= 1
        else:
            self.redirections -= 1
        self.url = page.then
        return min(self.retries, self.redirections) >= 0


class Frontier:
    """Queue of pages: round-robin over hosts, at most a single request per host at a time, with pauses in between.

    Args:
        urls: URLs, read a window ahead.
        delay: seconds between the end of a request to a host and the next request.
        window: number of pages in memory.
    """

    def __init__(self, urls: Iterable[str], delay: float, window: int = WINDOW) -> None:
        self._urls = iter(urls)
        self._delay, self._window = delay, window
        self._waiting: dict[str, deque[Quest]] = {}
        self._ready: list[tuple[float, int, str]] = []
        self._free_at: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        self._count = self._turn = 0

    def add(self, quest: Quest, now: float) -> None:
        """Appends a page to its host's queue, and a new host to the queue of hosts."""
        host = host_of(quest.url)
        self._count += 1
        if host in self._waiting:
            self._waiting[host].append(quest)
            return
        self._waiting[host] = deque([quest])
        self._queue(host, self._free_at.get(host, now))

    def _queue(self, host: str, at: float) -> None:
        self._turn += 1
        heapq.heappush(self._ready, (at, self._turn, host))

    def take(self, now: float) -> Quest | None:
        """Pops a page whose host is ready; None if no host is ready."""
        if self._count <= self._window // 2:  # refill by half windows, to read the file less often
            for url in islice(self._urls, self._window - self._count):
                self.add(Quest(url, url), now)
        if not self._ready or self._ready[0][0] > now:
            return None
        _, _, host = heapq.heappop(self._ready)
        self._count -= 1
        return self._waiting[host].popleft()

    def release(self, url: str, now: float, answered: bool = True) -> None:
        """Marks a request as finished and frees its host after the delay."""
        host = host_of(url)
        at = now if self.hopeless(url) else now + self._delay
        self._silent[host] = 0 if answered else self._silent.get(host, 0) + 1
        if self._waiting.get(host):
            self._queue(host, at)
            return
        for table in (self._waiting, self._silent, self._free_at):
            table.pop(host, None)
        self._free_at[host] = at
        for name in list(islice(self._free_at, 2)):  # oldest first
            if self._free_at[name] <= now:
                del self._free_at[name]

    def hopeless(self, url: str) -> bool:
        """Whether a URL's host failed to answer ``_HOPELESS`` requests in a row."""
        return self._silent.get(host_of(url), 0) >= _HOPELESS

    def wait(self, now: float) -> float | None:
        """Seconds until a host is ready; None if no host is queued."""
        return max(self._ready[0][0] - now, 0.0) if self._ready else None


def fetch_all(
    urls: Iterable[str], fetch: Callable[[str], Page], connections: int, delay: float, patience: float = 120.0
) -> Generator[Page, None, None]:
    """Fetches pages in parallel; yields them in order of completion.

    Args:
        urls: URLs, read on demand.
        fetch: thread-safe function that fetches a URL and reports failures in its result.
        connections: maximum number of concurrent requests.
        delay: seconds between two requests to a host.
        patience: seconds after which a request is abandoned.
    """
    frontier = Frontier(urls, delay)
    answers: SimpleQueue[tuple[Quest, Page]] = SimpleQueue()
    deadlines: dict[Quest, float] = {}  # earliest first

    def ask(quest: Quest) -> None:
        answers.put((quest, fetch(quest.url)))

    while True:
        quest = frontier.take(time.monotonic()) if len(deadlines) < connections else None
        if quest is not None and not frontier.hopeless(quest.url):
            deadlines[quest] = time.monotonic() + patience
            # A daemon thread per request: requests may be abandoned, and all are when the user interrupts.
            threading.Thread(target=ask, args=(quest,), daemon=True).start()
            continue
        if quest is not None:
            page = Page(quest.url, failed="of a host that does not answer")
        else:
            current_time = time.monotonic()
            pauses = [next(iter(deadlines.values())) - current_time] if deadlines else []
            pause = frontier.wait(current_time) if len(deadlines) < connections else None
            pauses += [pause] if pause is not None else []
            if not pauses:
                return
            try:
                quest, page = answers.get(timeout=max(min(pauses), 0.0))
            except Empty:
                quest = next(
                    (running_quest for running_quest, deadline in deadlines.items() if deadline <= time.monotonic()),
                    None,
                )
                if quest is None:
                    continue
                page = Page(quest.url, failed="timed out")
            if deadlines.pop(quest, None) is None:
                continue  # abandoned earlier
        frontier.release(quest.url, time.monotonic(), page.answered)
        if quest.goes_on(page):
            frontier.add(quest, time.monotonic())
        else:
            yield replace(page, url=quest.begun, then="")
