"""Cases of a parametrized test that share a start of ranks: they run one after another in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support.spawn import run_ranks

Calls = Mapping[str, tuple[int, tuple[Any, ...]]]
"""The number of ranks and the arguments of each case, by name."""


class SharedRanks:
    """Results of all selected cases of a test.

    Args:
        function: what ranks call for each case; a function of a module, as for ``run_ranks``.
        calls: the cases.
        timeout: seconds for all cases of a number of ranks.
    """

    def __init__(self, function: Callable[..., Any], calls: Calls, timeout: float = 240.0) -> None:
        self._function, self._calls, self._timeout = function, calls, timeout
        self._results: dict[str, list[Any]] = {}

    def results(self, request: pytest.FixtureRequest | None, name: str) -> list[Any]:
        """The results of a case by rank. Ranks that start for it run all selected cases with as many ranks.

        Args:
            request: of a test with a parameter ``name``; None to run this case alone.
            name: the case.
        """
        if name not in self._results:
            ranks = self._calls[name][0]
            names = [name] if request is None else _selected_names(request)
            calls = {case: self._calls[case][1] for case in names if self._calls[case][0] == ranks}
            by_rank = run_ranks(ranks, _call_all, self._function, calls, timeout=self._timeout)
            self._results |= {case: [results[case] for results in by_rank] for case in calls}
        return self._results[name]


def _selected_names(request: pytest.FixtureRequest) -> list[str]:
    """The values of ``name`` for which pytest runs the test of a request."""
    items: list[Any] = request.session.items
    tests = [item for item in items if item.path == request.path]
    return [test.callspec.params["name"] for test in tests if test.originalname == request.function.__name__]


def _call_all(function: Callable[..., Any], calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    results = {}
    for name, arguments in calls.items():
        print(f"case: {name}", flush=True)
        results[name] = function(*arguments)
    return results
