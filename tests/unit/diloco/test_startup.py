"""Starts of islands: checkpoints, quorums, late islands and restarts."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.diloco import startup as starting
from megatron.diloco.membership import Islands
from megatron.diloco.round_decision import RoundOutcome, RoundReport
from megatron.diloco.startup import StartLimits, choose_iteration, choose_start, refusal_key
from megatron.diloco.store import IslandStore
from megatron.distributed.errors import CommunicationError
from tests.unit.diloco.support import GOOD, MakeIslands, each


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("start/1", "[1, 2]"),
        ("start/1", '{"a": 1}'),
        ("start", "[]"),
        ("start", '{"members": ["x"], "problem": "", "iteration": null, "behind": [], "in_step": false}'),
        ("iteration/1", "7"),
    ],
)
def test_invalid_entries_at_the_start_are_an_error_of_one_line(make_islands: MakeIslands, key: str, text: str) -> None:
    (island,) = make_islands(2, 2, numbers=[0])
    island.store.switch_generation(1)
    island.store.box.set(key, text)
    name, limits = key.split("/")[0], StartLimits(2, 2, 5.0)
    answers: dict[str, Any] = {"start": [0, False, {}, ""], "iteration": [1]}
    judges = {
        "start": partial(choose_start, limits=limits),
        "iteration": partial(choose_iteration, limits=limits, all_below=0),
    }
    with pytest.raises(CommunicationError, match=f"holds something else than an island writes, at {name}"):
        island.start._wait_for_all(name, answers[name], judges[name])


@pytest.mark.parametrize(("in_step", "quorum"), [(True, 1), (False, 2)])
def test_islands_with_different_flags_all_fail(make_islands: MakeIslands, in_step: bool, quorum: int) -> None:
    pair = make_islands(2, quorum)
    for error in each(pair, lambda i: i.begin_generation(3, in_step, {"--lr": str(i.island)})):
        assert isinstance(error, UserError)
        assert "do not agree: --lr is 0 and 1" in str(error)


def test_different_weights_or_a_refusal_end_the_start(port: int, make_islands: MakeIslands) -> None:
    pair = make_islands(2, 1)
    for error in each(pair, lambda i: i.begin_generation(3, False, {}, f"{i.island}")):
        assert isinstance(error, UserError)
        assert "islands 0 and 1 begin at iteration 3 with different weights" in str(error)
    for island in pair:
        island.leave()
    pair[0].store.end_generation()
    other = IslandStore("127.0.0.1", port, 10.0)
    other.switch_generation(other.newest_generation())
    other.put(refusal_key(1), "--load x: damaged")
    began = time.monotonic()
    (again,) = make_islands(2, 1, numbers=[0])
    with pytest.raises(UserError, match=r"^island 1: --load x: damaged$"):
        again.begin_generation(3, False, {})
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("checkpoints", "quorum", "all_below", "iteration"),
    [
        ([[20, 10], [20, 10], [20, 10]], 3, 0, 20),
        ([[30, 20, 10], [20, 10], [30, 20]], 3, 0, 20),  # the newest of all islands
        ([[30, 20, 10], [20, 10], [30, 20]], 2, 0, 30),  # the newest of a quorum: island 1 joins
        ([[30, 20, 10], [20, 10], [30, 20]], 2, 31, 20),  # all are needed during the synchronous phase
        ([[30, 20], [], [20]], 2, 0, 20),
        ([[], [], []], 3, 30, None),  # all start from scratch
        ([[30], [20, 10], [20, 10]], 2, 0, 20),  # island 0 has only newer checkpoints
        # Islands without checkpoints receive the state of others, even if all are needed.
        ([[40, 30], [], [30, 20]], 3, 0, 30),
        ([[40, 30], [], [30, 20]], 3, 100, 30),
        ([[], [40, 30], []], 3, 100, 40),
        # The same if islands were killed between their saves.
        ([[60, 50], [40], [40, 30]], 3, 0, 40),
        ([[60, 50], [40], [30]], 3, 0, 60),
    ],
)
def test_islands_resume_from_the_newest_checkpoint_of_a_quorum(
    make_islands: MakeIslands, checkpoints: list[list[int]], quorum: int, all_below: int, iteration: int | None
) -> None:
    islands = make_islands(3, quorum)
    chosen = each(islands, lambda i: i.start.choose_iteration(checkpoints[i.island], all_below))
    assert chosen == [iteration] * 3


def test_too_few_islands_do_not_resume() -> None:
    """A missing island is named."""
    late = choose_iteration({0: [20]}, StartLimits(2, 1, 5.0), 30)
    assert late.problem.startswith("island 1 did not come within 5 s")
    assert choose_iteration({0: [20]}, StartLimits(2, 1, 5.0), 0).iteration == 20
    assert choose_iteration({0: [20], 1: []}, StartLimits(3, 2, 5.0), 0).iteration == 20
    assert choose_iteration({0: [20], 1: []}, StartLimits(3, 2, 5.0), 30).problem.startswith("island 2 did not come")


@pytest.mark.parametrize("decides", [0, 1])
def test_the_most_advanced_islands_decide_whether_all_are_needed(make_islands: MakeIslands, decides: int) -> None:
    """Island 0 is past the synchronous phase and goes on alone; island 1 is behind and joins, whoever decides."""
    pair = make_islands(2, 1)

    def begin(island: Islands) -> bool:
        time.sleep(0.0 if island.island == decides else 0.4)
        return island.begin_generation(9 if island.island == 0 else 3, island.island == 1, {}, str(island.island))

    assert each(pair, begin) == [True, False]


@pytest.mark.parametrize("in_step", [False, True])
def test_all_agree_on_late_islands_and_on_the_synchronous_phase(make_islands: MakeIslands, in_step: bool) -> None:
    """The most advanced islands decide about the synchronous phase."""
    islands = make_islands(3, 3)
    starts = each(
        islands, lambda i: i.begin_generation(5 if i.island else 0, in_step or not i.island, {}, str(i.island > 0))
    )
    assert starts == [False, True, True]
    assert [(island.expected, island.behind, island.starts_synchronously) for island in islands] == [
        ((1, 2), (0,), in_step)
    ] * 3
    assert [island.admits_islands for island in islands] == [False, True, False]
    assert islands[2]._awaited_islands() == {0, 1, 2}


def test_a_missing_island_at_the_start_is_an_error_below_the_quorum(port: int) -> None:
    alone = Islands(IslandStore("127.0.0.1", port, 10.0), 0, 2, 2, 1.0, 0.3, None)
    with pytest.raises(UserError, match=r"^island 1 did not come within 0.3 s .*; start all of them, or lower the quo"):
        alone.begin_generation(0, False, {})
    alone.leave()
    alone.store.end_generation()
    spared = Islands(IslandStore("127.0.0.1", port, 10.0), 0, 2, 1, 1.0, 0.3, None)
    assert spared.begin_generation(0, False, {}) is True
    assert spared.expected == (0,)
    spared.leave()


def _start(port: int, number: int, seconds: float = 30.0) -> starting.IslandStart:
    store = IslandStore("127.0.0.1", port, 10.0)
    return starting.IslandStart(store, number, StartLimits(2, 2, seconds), lambda call: call(), lambda line: None)


def test_islands_do_not_wait_for_an_ended_launcher(port: int) -> None:
    """Unless the island comes after all."""
    alone, silent = _start(port, 0), _start(port, 1)
    alone.store.note_end(1)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^island 1 did not come .*, or ended before; start all of them"):
        alone.choose_iteration([], 0)
    assert time.monotonic() - began < 5
    alone.store.end_generation()
    pair = [_start(port, number) for number in range(2)]
    silent.store.switch_generation(2)

    def come(island: starting.IslandStart) -> int | None:
        time.sleep(0.0 if island.island else 0.5)
        return island.choose_iteration([7], 0)

    assert each(pair, come) == [7, 7]
    for island in (alone, *pair):
        island.store.stop_heartbeats()


@pytest.mark.slow
def test_islands_may_start_again_after_a_failed_start(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like islands restarted by a launcher, at the same meeting place."""
    monkeypatch.setattr("megatron.diloco.store.SILENT_SECONDS", 0.5)
    alone = _start(port, 0, 0.3)
    with pytest.raises(UserError, match="island 1 did not come"):
        alone.choose_iteration([100], 0)
    alone.store.stop_heartbeats()
    pair = [_start(port, number) for number in range(2)]
    assert each(pair, lambda island: island.choose_iteration([100], 0)) == [100, 100]
    for island in pair:  # which die before the run begins
        island.store.stop_heartbeats()
    pair = [_start(port, number) for number in range(2)]
    assert each(pair, lambda island: island.choose_iteration([90], 0)) == [90, 90]
    for island in pair:
        island.store.stop_heartbeats()


@pytest.mark.slow
def test_a_generation_ends_with_its_last_island(make_islands: MakeIslands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.diloco.store.SILENT_SECONDS", 1.0)
    first = make_islands(2, 2)
    assert each(first, lambda i: i.begin_generation(0, True, {})) == [True, True]
    first[0].store.put("local", True)  # after the synchronous phase another island may join
    with pytest.raises(UserError, match="--island 0: there is an island 0 already; give each its own number"):
        make_islands(2, 2, numbers=[0])[0].begin_generation(0, True, {})
    first[1].leave()
    (again,) = make_islands(2, 2, numbers=[1])
    assert again.begin_generation(0, True, {}) is False  # island 0 is alive
    for island in first:
        island.leave()
    second = make_islands(2, 2)
    assert each(second, lambda i: i.begin_generation(4, True, {})) == [True, True]
    assert [island.store.generation for island in second] == [2, 2]


@pytest.mark.slow
def test_a_late_island_learns_where_the_final_checkpoint_is(
    make_islands: MakeIslands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of waiting for islands that have finished. With that checkpoint it may start a longer run."""
    monkeypatch.setattr("megatron.diloco.store.SILENT_SECONDS", 0.5)
    pair = make_islands(2, 1)
    assert each(pair, lambda i: i.begin_generation(700, False, {})) == [True, True]
    pair[1].leave()
    assert pair[0].report_to_round("1200/0/0", RoundReport(1.0, 1.0)).members == (0,)
    assert pair[0].decide_outcome("1200/0/0", (0,), GOOD) is RoundOutcome.COUNTS
    assert pair[0].announce_end(1200, "/runs/saved/island_0") == [1]
    assert pair[0].has_late_islands()
    pair[0].leave()
    late = [750, 500]
    lines: list[str] = []
    (again,) = make_islands(2, 1, numbers=[1], start_seconds=2.0, tell=lines.append)
    with pytest.raises(
        UserError, match=r"^island 0 has come to the end, iteration 1200, and island 1 is late, at 750; "
    ):
        again.start.choose_iteration(late, 0)
    assert lines[0].startswith("waiting for island 0 of the run before to end, 2 s at most")
    with pytest.raises(
        UserError, match=r"its last checkpoint is in /runs/saved/island_0: copy it to this island's fol"
    ):
        make_islands(2, 1, numbers=[1], start_seconds=2.0)[0].start.choose_iteration(late, 0)
    (longer,) = make_islands(2, 1, numbers=[1], start_seconds=2.0, tell=lines.append)
    assert longer.start.choose_iteration([1200, *late], 0) == 1200
    assert lines[-1] == "waiting for island 0 to come to the start, 2 s at most"
