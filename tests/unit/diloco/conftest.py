"""Meeting places and islands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from megatron.diloco import startup, store, waiting
from megatron.diloco.membership import Islands
from megatron.diloco.store import IslandStore, serve
from tests.unit.diloco.support import MakeIslands


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the heartbeat, and the time after which a line names who is awaited."""
    for module in (store, startup):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.5)


@pytest.fixture
def port() -> Iterator[int]:
    store = serve("127.0.0.1", 0)
    yield store.port
    del store


@pytest.fixture
def make_islands(port: int) -> Iterator[MakeIslands]:
    islands_of_test: list[Islands] = []

    def make(
        count: int,
        quorum: int,
        numbers: Sequence[int] | None = None,
        seconds: float = 1.0,
        start_seconds: float = 5.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> list[Islands]:
        islands = [
            Islands(
                IslandStore("127.0.0.1", port, 10.0), number, count, quorum, seconds, start_seconds, None, tell=tell
            )
            for number in (range(count) if numbers is None else numbers)
        ]
        islands_of_test.extend(islands)
        return islands

    yield make
    for island in islands_of_test:
        island.leave()
