"""Rounds of islands, and islands that leave and join."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.diloco.membership import Islands
from megatron.diloco.round_decision import RoundOutcome, RoundReport, Vote
from megatron.diloco.startup import QuorumError
from megatron.diloco.store import SILENT_SECONDS
from megatron.distributed.errors import CommunicationError
from tests.unit.diloco.support import GOOD, MakeIslands, each, together


@pytest.mark.parametrize("text", ["[1]", "{", "[[], 1, 2]", '["x", "1", 0]', "null", "1e999", "[" * 5000])
def test_invalid_entries_are_an_error_of_one_line(make_islands: MakeIslands, text: str) -> None:
    """Anyone who reaches the meeting place may write anything."""
    first, second = make_islands(2, 2)
    each((first, second), lambda i: i.begin_generation(0, False, {}))
    second.leave()
    first.store.box.set("1/0/arrived/1", text)
    with pytest.raises(CommunicationError, match=r"holds something else than an island writes, at 1/0/arrived/1: "):
        first.report_to_round("1/0", RoundReport(1.0, 1.0))


def test_a_round_goes_on_without_an_island_that_left(make_islands: MakeIslands) -> None:
    first, second, third = make_islands(3, 2)
    assert each((first, second, third), lambda i: i.begin_generation(5, False, {"--lr": "1"})) == [True] * 3
    decisions = each((first, second, third), lambda i: i.report_to_round("5/0", RoundReport(1.0, float(i.island))))
    assert [d.members for d in decisions] == [(0, 1, 2)] * 3
    votes = each((first, second, third), lambda i: i.decide_outcome("5/0", (0, 1, 2), Vote(i is second)))
    assert votes == [RoundOutcome.FAILED] * 3
    third.leave()
    began = time.monotonic()
    decisions = each((first, second), lambda i: i.report_to_round("5/1", RoundReport(1.0, 0.0)))
    assert 0.9 < time.monotonic() - began < 5
    assert [d.members for d in decisions] == [(0, 1)] * 2
    assert each((first, second), lambda i: i.decide_outcome("5/1", (0, 1), GOOD)) == [RoundOutcome.COUNTS] * 2
    # The next round waits only for the members of the last round.
    began = time.monotonic()
    each((first, second), lambda i: i.report_to_round("6/0", RoundReport(1.0, 0.0)))
    assert time.monotonic() - began < 0.9
    # An island that is too late learns that it is not a member.
    assert third.report_to_round("6/0", RoundReport(1.0, 0.0)).members == (0, 1)


def test_fewer_than_the_quorum_end_with_a_reason(make_islands: MakeIslands) -> None:
    first, second = make_islands(2, 2)
    each((first, second), lambda i: i.begin_generation(0, False, {}))
    second.leave()
    with pytest.raises(QuorumError, match="1 of 2 islands came to a round within 1 s, and --islands-quorum is 2"):
        first.report_to_round("1/0", RoundReport(1.0, 1.0))


def test_a_second_process_of_an_island_replaces_a_waiting_process(make_islands: MakeIslands) -> None:
    first, second, third = make_islands(2, 1, numbers=(0, 1, 1))
    assert each((first, second), lambda i: i.begin_generation(3 if i is second else 5, False, {})) == [True, False]
    results: list[Any] = []
    waits = threading.Thread(target=lambda: results.extend(together(second.request_to_join)))
    waits.start()
    while not first.store.get("joining/1"):
        time.sleep(0.02)
    third.store.switch_generation(1)
    third._take_ticket()
    waits.join(20)
    assert isinstance(results[0], UserError)
    assert "another process waits to join as island 1" in str(results[0])


def test_a_late_island_joins(make_islands: MakeIslands) -> None:
    ahead, late = make_islands(2, 1)
    assert each((ahead, late), lambda i: i.begin_generation(3 if i is late else 5, False, {})) == [True, False]
    late.expected = ()  # like a restarted island

    def go_on() -> list[tuple[int, int]]:
        time.sleep(0.3)  # the late island asks first
        decision = ahead.report_to_round("6/0", RoundReport(1.0, 1.0))
        assert decision.members == (0,)
        assert ahead.decide_outcome("6/0", decision.members, GOOD) is RoundOutcome.COUNTS
        return ahead.admit_islands()

    let_in, answer = together(go_on, late.request_to_join)
    assert let_in == [(1, 1)]
    assert answer[0] == 1
    assert (answer[1].source, answer[1].round) == (0, "6/0")
    # From the next round on both are members, in any order of arrival.
    for key, first in (("7/0", late), ("8/0", ahead)):

        def meet(island: Islands, key: str = key, first: Islands = first) -> tuple[tuple[int, ...], RoundOutcome]:
            time.sleep(0.0 if island is first else 0.4)
            members = island.report_to_round(key, RoundReport(1.0, 1.0)).members
            return members, island.decide_outcome(key, (0, 1), GOOD)

        assert each((ahead, late), meet) == [((0, 1), RoundOutcome.COUNTS)] * 2


def test_islands_do_not_wait_for_silent_or_joining_islands(
    make_islands: MakeIslands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the time limit. Islands with other flags are refused, and only the first member admits islands."""
    monkeypatch.setattr("megatron.diloco.store.SILENT_SECONDS", 1.0)
    assert SILENT_SECONDS == 10
    first, second, third = make_islands(3, 1, seconds=25.0)
    assert each((first, second, third), lambda i: i.begin_generation(5, False, {"--lr": "1"})) == [True] * 3
    third.leave()
    began = time.monotonic()
    decisions = each((first, second), lambda i: i.report_to_round("6/0", RoundReport(1.0, 0.0)))
    assert [d.members for d in decisions] == [(0, 1)] * 2
    assert time.monotonic() - began < 20
    assert each((first, second), lambda i: i.decide_outcome("6/0", (0, 1), GOOD)) == [RoundOutcome.COUNTS] * 2
    (again,) = make_islands(3, 1, numbers=[2], seconds=25.0)
    again.store.switch_generation(1)
    again._identity = {"--lr": "2"}
    results: list[Any] = []
    waits = threading.Thread(target=lambda: results.extend(together(again.request_to_join)))
    waits.start()
    while not first.store.get("joining/2"):
        time.sleep(0.02)
    assert second.admit_islands() == []
    assert first.store.get("welcome/1") is None
    assert first.admit_islands() == []
    waits.join(20)
    assert isinstance(results[0], UserError)
    assert "island 2 and the others do not agree: --lr is 2 and 1" in str(results[0])
    # Island 1 dies in its local steps and asks to join long before it would count as silent.
    monkeypatch.setattr("megatron.diloco.store.SILENT_SECONDS", 100.0)
    second._take_ticket()
    began = time.monotonic()
    assert first.report_to_round("7/0", RoundReport(1.0, 0.0)).members == (0,)
    assert time.monotonic() - began < 5


def test_a_line_names_missing_islands_and_the_time_limit(make_islands: MakeIslands) -> None:
    lines: list[str] = []
    pair = make_islands(2, 1, seconds=1.5, tell=lines.append)
    each(pair, lambda i: i.begin_generation(0, False, {}))
    assert lines == []
    pair[1].leave()
    pair[0].report_to_round("1/0", RoundReport(1.0, 1.0))
    assert lines == ["waiting for island 1 to come to a round, 1.5 s at most"]
    pair[0].leave()
