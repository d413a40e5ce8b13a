"""Membership of islands: what is decided, and that everyone decides alike."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.diloco import startup as starting
from megatron.diloco.groups import CPU, group_apart
from megatron.diloco.membership import Islands, JoinReply
from megatron.diloco.round_decision import (
    OUTLIER_RATIO,
    Decision,
    RoundOutcome,
    RoundReport,
    Vote,
    check_mean,
    select_members,
)
from megatron.diloco.startup import QuorumError, StartLimits, choose_iteration, choose_start, refusal_of
from megatron.diloco.store import _PREFIX, SILENT_SECONDS, HeartbeatMonitor, IslandStore, serve
from megatron.distributed.errors import CommunicationError
from megatron.distributed.store import OWN_INTERFACE

GOOD = Vote(failed=False, mean_norm=1.0, usual_norm=1.0)


@pytest.fixture
def port() -> Iterator[int]:
    store = serve("127.0.0.1", 0)
    yield store.port
    del store


def _ignore(line: str) -> None:
    """Prints nothing."""


def _island(
    port: int, number: int, count: int, quorum: int, seconds: float = 1.0, tell: Callable[[str], None] = _ignore
) -> Islands:
    place = IslandStore("127.0.0.1", port, 10.0)
    return Islands(place, number, count, quorum, seconds, 5.0, None, tell=tell)


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """What calls return, or raise, that run at the same time."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_the_meeting_place_listens_at_its_own_address_alone() -> None:
    stores = [serve("127.0.0.2", 0) for _ in range(5)]
    for store in stores:
        with socket.create_connection(("127.0.0.2", store.port), 5):
            pass
    # Another process may listen at one of these ports of another address; a store that did so would at all five.
    assert any(all(_refuses(other, store.port) for other in ("127.0.0.1", "127.0.0.3")) for store in stores)
    store = stores[0]
    IslandStore("127.0.0.2", store.port, 10.0).put("key", 1)
    with pytest.raises(CommunicationError, match=rf"cannot be at 127\.0\.0\.2:{store.port}: .*in use"):
        serve("127.0.0.2", store.port)
    with pytest.raises(CommunicationError, match=r"cannot be at 192\.0\.2\.1:0: .*assign requested address"):
        serve("192.0.2.1", 0)  # of documentation; no machine's
    with pytest.raises(CommunicationError, match=r"cannot be at no-such-host\.invalid:0: "):
        serve("no-such-host.invalid", 0)


def _refuses(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def _listening() -> set[str]:
    """The addresses at which this process's sockets listen (IPv4)."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    own = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in own}


def test_islands_talk_over_the_address_that_reaches_the_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's name resolves to; GLOO_SOCKET_IFNAME decides where it is set, and gloo does where the
    place is served at every address."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = serve("127.0.0.4", 0)
    place, other = (IslandStore("127.0.0.4", store.port, 10.0) for _ in range(2))
    assert place.own_address() == "127.0.0.1"  # the kernel's choice for every address of loopback
    monkeypatch.setattr(IslandStore, "own_address", lambda self: "127.0.0.5")
    before = _listening()
    pair = [Islands(at, number, 2, 2, 5.0, 5.0, None) for number, at in enumerate((place, other))]
    groups = _together(*(lambda i=i: i.group_of((0, 1), "pair", 5.0) for i in pair))
    assert _listening() - before == {"127.0.0.5"}
    assert [group.size for group in groups] == [2, 2]
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert place.own_address() is None
    monkeypatch.setenv(OWN_INTERFACE, "eth7")  # which the user has not chosen
    assert place.own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    everywhere = serve("0.0.0.0", 0)
    assert IslandStore("0.0.0.0", everywhere.port, 10.0).own_address() is None


def test_a_listener_that_is_no_meeting_place_is_given_the_time_limit_and_no_more() -> None:
    """It accepts and says nothing, for which torch waits for ever; a line says at what this process waits."""
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, began = listener.getsockname()[1], time.monotonic()
        with pytest.raises(CommunicationError, match=rf"127\.0\.0\.1:{port} .* not answered .* within 1 s: another"):
            IslandStore("127.0.0.1", port, 1.0, told.append)
        assert time.monotonic() - began < 15
    assert told == [f"waiting for the islands' meeting place at 127.0.0.1:{port}, 1 s at most"]


def test_a_meeting_place_that_falls_silent_is_given_the_time_limit_and_no_more() -> None:
    """Its process is stopped, so that connections stay and nothing is answered."""
    code = "from megatron.diloco.store import serve; import time; s = serve('127.0.0.1', 0); "
    code += "print(s.port, flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            place = IslandStore("127.0.0.1", int(server.stdout.readline()), 1.0)
            place.put("key", 1)
            os.kill(server.pid, signal.SIGSTOP)
            # The signal is delivered some time after kill() has returned; until then the server still answers.
            os.waitid(os.P_PID, server.pid, os.WSTOPPED)
            began = time.monotonic()
            with pytest.raises(CommunicationError, match="has not answered for 1 s: the launcher that serves it hangs"):
                place.get("key")
            with pytest.raises(CommunicationError, match=r"islands \(0, 1\) do not meet: "):
                group_apart(dist.PrefixStore("x", place.box), (0, 1), 0, "islands", 1.0, None, CPU)
            assert time.monotonic() - began < 25
        finally:
            server.kill()


def test_a_reader_that_never_reads_is_cut_off_before_it_fills_the_memory() -> None:
    """It asks on and on for a value of 1 MiB; whoever reads is served all the while."""
    code = "from megatron.diloco.store import serve; import time; s = serve('127.0.0.1', 0); "
    code += "print(s.port, flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            place = IslandStore("127.0.0.1", int(server.stdout.readline()), 20.0)
            place.put("key", "x" * (1 << 20))
            before = _resident(server.pid)
            # Requests of torch's store: one that says who asks, and many for a value.
            key = f"/{_PREFIX}/key".encode()
            with socket.create_connection(place._address) as greedy:
                greedy.settimeout(0.5)
                greedy.sendall(b"\0" + (0x3C85F7CE).to_bytes(4, "little"))
                ask = b"\3" + len(key).to_bytes(8, "little") + key
                most, last = 0, time.monotonic() + 5
                with suppress(OSError):
                    for _ in range(2000):
                        greedy.sendall(ask)
                        most = max(most, _resident(server.pid) - before)
                while time.monotonic() < last and (most < 32 << 20 or _resident(server.pid) - before > 32 << 20):
                    most = max(most, _resident(server.pid) - before)
                    assert place.get("key") == "x" * (1 << 20)
                    time.sleep(0.05)
                with pytest.raises((BrokenPipeError, ConnectionResetError)):
                    _send_repeatedly(greedy, ask)
            assert 32 << 20 < most < 1 << 30, "what is asked for is not piled up, and the test says nothing"
        finally:
            server.kill()


def _send_repeatedly(connection: socket.socket, data: bytes) -> None:
    for _ in range(100):
        connection.sendall(data)
        time.sleep(0.02)


def _resident(pid: int) -> int:
    """Memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_meeting_place_may_have_an_address_of_ipv6() -> None:
    store = serve("::1", 0)
    place = IslandStore("::1", store.port, 10.0)
    place.put("key", 1)
    assert place.get("key") == 1
    assert place.where == f"[::1]:{store.port}"


def test_differences_that_are_not_finite_or_absurd_are_left_out() -> None:
    came = {
        0: RoundReport(1.0, 2.0),
        1: RoundReport(math.nan, 3.0),
        2: RoundReport(2.0, 4.0),
        3: RoundReport(OUTLIER_RATIO * 3, 5.0),
    }
    found = select_members(came)
    assert found.members == (0, 2)
    assert set(found.left_out) == {1, 3}
    assert found.mean_loss == 3.0
    assert found.stop == 0
    assert (
        Decision.decode(select_members({0: RoundReport(1.0, 2.0), 1: RoundReport(math.nan, 2.0, stop=3)}).encode()).stop
        == 3
    )
    assert str(Decision.decode(found.encode())) == str(found)
    with pytest.raises(ValueError, match="no island has a finite difference"):
        select_members({0: RoundReport(math.inf, 1.0)})
    assert select_members({0: RoundReport(0.0, 1.0), 1: RoundReport(5.0, 1.0), 2: RoundReport(0.0, 1.0)}).members == (
        0,
        1,
        2,
    )
    assert select_members({0: RoundReport(1e-9, 1.0), 1: RoundReport(5.0, 1.0)}).members == (
        0,
        1,
    )  # of two nobody knows which is odd
    # More than 100 times the median; of four the lower one, so that two that are odd do not vouch for each other.
    four = [1.0, 2.0, 2.0 * 100, 2.0 * 101]
    assert select_members({k: RoundReport(norm, 1.0) for k, norm in enumerate(four)}).members == (0, 1, 2)
    assert select_members({k: RoundReport(norm, 1.0) for k, norm in enumerate([1.0, 2.0, 300.0, 400.0])}).members == (
        0,
        1,
    )


def test_of_two_differences_the_last_mean_tells_which_one_is_odd() -> None:
    came = {0: RoundReport(1.0, 1.0), 1: RoundReport(1e30, 1.0)}
    assert select_members(came, 2.0).members == (0,)
    assert "5e+29 times that of the last mean" in select_members(came, 2.0).left_out[1]
    assert select_members({0: RoundReport(1e30, 1.0), 1: RoundReport(1e30, 1.0)}, 2.0).members == (0, 1)
    assert select_members({0: RoundReport(1e30, 1.0)}, 2.0).members == (0,)
    # In the first round the parameters do, which may be small, and change a lot.
    assert select_members(came, 0.0, 10.0).members == (0,)
    assert select_members(came, 0.0, 10.0).left_out == {
        1: "the norm of its difference is 1e+30, 1e+29 times that of the parameters"
    }
    assert select_members({0: RoundReport(1.0, 1.0), 1: RoundReport(900.0, 1.0)}, 0.0, 10.0).members == (0, 1)
    assert select_members({0: RoundReport(0.1, 1.0), 1: RoundReport(1100.0, 1.0)}, 20.0, 10.0).members == (0, 1)


def test_a_mean_is_judged_by_what_all_members_mean_by_usual() -> None:
    def outcome(mean_norm: float, *usual: float) -> RoundOutcome:
        return check_mean([Vote(False, mean_norm, one) for one in usual])

    assert outcome(math.nan, 1.0, 1.0) is outcome(math.inf, 1.0) is RoundOutcome.SPOILED
    assert outcome(1e29, 1.0, 1.0, 1.0) is RoundOutcome.SPOILED
    assert outcome(99.0, 1.0, 1.0, 1.0) is RoundOutcome.COUNTS
    assert (
        outcome(101.0, 1.0, 1.0, 1.0, 1e30) is RoundOutcome.SPOILED
    )  # which one of them says of itself proves nothing
    assert outcome(500.0, 1.0, 1000.0) is RoundOutcome.COUNTS  # of two nobody knows
    assert outcome(5.0, 0.0, 0.0) is RoundOutcome.COUNTS
    assert check_mean([Vote(True, math.nan, 1.0), GOOD]) is RoundOutcome.FAILED


@pytest.mark.parametrize("text", ["[1]", "{", "[[], 1, 2]", '["x", "1", 0]', "null", "1e999", "[" * 5000])
def test_what_no_island_writes_is_one_line(port: int, text: str) -> None:
    """Whoever reaches the meeting place may put anything there."""
    one, two = (_island(port, number, 2, 2) for number in range(2))
    _together(*(lambda i=i: i.begin_generation(0, False, {}) for i in (one, two)))
    two.leave()
    one.store.box.set("1/0/arrived/1", text)
    with pytest.raises(CommunicationError, match=r"holds something else than an island writes, at 1/0/arrived/1: "):
        one.report_to_round("1/0", RoundReport(1.0, 1.0))
    one.leave()


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
def test_what_no_island_writes_at_the_start_is_one_line(port: int, key: str, text: str) -> None:
    one = _island(port, 0, 2, 2)
    one.store.take_generation(1)
    one.store.box.set(key, text)
    name, limits = key.split("/")[0], StartLimits(2, 2, 5.0)
    own: dict[str, Any] = {"start": [0, False, {}, ""], "iteration": [1]}
    judges = {
        "start": partial(choose_start, limits=limits),
        "iteration": partial(choose_iteration, limits=limits, all_below=0),
    }
    with pytest.raises(CommunicationError, match=f"holds something else than an island writes, at {name}"):
        one.start._wait_for_all(name, own[name], judges[name])
    one.leave()


def test_decisions_that_no_island_makes_are_refused() -> None:
    good = select_members({0: RoundReport(1.0, 1.0), 1: RoundReport(1.0, 1.0)}).encode()
    changes: list[dict[str, Any]] = [
        {"members": []},
        {"members": [0, 7]},
        {"members": "x"},
        {"arrivals": {"0": ["1", "1", 99]}},
    ]
    for change in changes:
        with pytest.raises((ValueError, TypeError, LookupError)):
            Decision.decode({**good, **change})
    with pytest.raises(ValueError, match="island 3 is none of islands"):
        JoinReply.read({"source": 3, "round": "1/0/0", "members": [0, 1], "problem": ""})


def test_a_round_of_all_and_one_without_an_island_that_is_gone(port: int) -> None:
    one, two, three = (_island(port, number, 3, 2) for number in range(3))
    assert (
        _together(*(lambda i=i: i.begin_generation(5, False, {"--lr": "1"}) for i in (one, two, three))) == [True] * 3
    )
    found = _together(
        *(lambda i=i: i.report_to_round("5/0", RoundReport(1.0, float(i.island))) for i in (one, two, three))
    )
    assert [d.members for d in found] == [(0, 1, 2)] * 3
    votes = _together(*(lambda i=i: i.decide_outcome("5/0", (0, 1, 2), Vote(i is two)) for i in (one, two, three)))
    assert votes == [RoundOutcome.FAILED] * 3
    three.leave()
    began = time.monotonic()
    found = _together(*(lambda i=i: i.report_to_round("5/1", RoundReport(1.0, 0.0)) for i in (one, two)))
    assert 0.9 < time.monotonic() - began < 5
    assert [d.members for d in found] == [(0, 1)] * 2
    assert (
        _together(*(lambda i=i: i.decide_outcome("5/1", (0, 1), GOOD) for i in (one, two))) == [RoundOutcome.COUNTS] * 2
    )
    # The next round waits for the last one's members alone.
    began = time.monotonic()
    _together(*(lambda i=i: i.report_to_round("6/0", RoundReport(1.0, 0.0)) for i in (one, two)))
    assert time.monotonic() - began < 0.9
    # The island that comes too late learns that it has no part in it.
    assert three.report_to_round("6/0", RoundReport(1.0, 0.0)).members == (0, 1)


def test_fewer_than_the_quorum_end_with_a_reason(port: int) -> None:
    one, two = (_island(port, number, 2, 2) for number in range(2))
    _together(*(lambda i=i: i.begin_generation(0, False, {}) for i in (one, two)))
    two.leave()
    with pytest.raises(QuorumError, match="1 of 2 islands came to a round within 1 s, and --islands-quorum is 2"):
        one.report_to_round("1/0", RoundReport(1.0, 1.0))


@pytest.mark.parametrize(
    ("positions", "in_step", "quorum", "reason"),
    [
        ((3, 3), True, 1, "do not agree: --lr is 0 and 1"),
        ((3, 3), False, 2, "do not agree: --lr is 0 and 1"),
    ],
)
def test_islands_that_cannot_go_together_all_say_so(
    port: int, positions: tuple[int, int], in_step: bool, quorum: int, reason: str
) -> None:
    pair = [_island(port, number, 2, quorum) for number in range(2)]
    starts = [lambda i=i: i.begin_generation(positions[i.island], in_step, {"--lr": str(i.island)}) for i in pair]
    for error in _together(*starts):
        assert isinstance(error, UserError)
        assert reason in str(error)


def test_islands_with_different_weights_or_a_problem_of_one_end_at_the_start(port: int) -> None:
    pair = [_island(port, number, 2, 1) for number in range(2)]
    for error in _together(*(lambda i=i: i.begin_generation(3, False, {}, f"{i.island}") for i in pair)):
        assert isinstance(error, UserError)
        assert "islands 0 and 1 begin at iteration 3 with different weights" in str(error)
    for island in pair:
        island.leave()
    pair[0].store.end_generation(1)
    other = IslandStore("127.0.0.1", port, 10.0)
    other.take_generation(other.newest_generation())
    other.put(refusal_of(1), "--load x: damaged")
    began = time.monotonic()
    again = _island(port, 0, 2, 1)
    with pytest.raises(UserError, match=r"^island 1: --load x: damaged$"):
        again.begin_generation(3, False, {})
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("held", "quorum", "all_below", "iteration"),
    [
        ([[20, 10], [20, 10], [20, 10]], 3, 0, 20),
        ([[30, 20, 10], [20, 10], [30, 20]], 3, 0, 20),  # the newest of all
        ([[30, 20, 10], [20, 10], [30, 20]], 2, 0, 30),  # of a quorum: island 1 joins the others
        ([[30, 20, 10], [20, 10], [30, 20]], 2, 31, 20),  # while they go in step all are needed
        ([[30, 20], [], [20]], 2, 0, 20),
        ([[], [], []], 3, 30, None),  # all begin anew
        ([[30], [20, 10], [20, 10]], 2, 0, 20),  # island 0 has only newer ones
        # Who has none is sent what the others have, though all are needed.
        ([[40, 30], [], [30, 20]], 3, 0, 30),
        ([[40, 30], [], [30, 20]], 3, 100, 30),
        ([[], [40, 30], []], 3, 100, 40),
        # Nor has anyone to refuse to go on, where a kill came between their saves.
        ([[60, 50], [40], [40, 30]], 3, 0, 40),
        ([[60, 50], [40], [30]], 3, 0, 60),
    ],
)
def test_islands_go_on_from_the_newest_checkpoint_that_enough_of_them_have(
    port: int, held: list[list[int]], quorum: int, all_below: int, iteration: int | None
) -> None:
    islands = [_island(port, number, 3, quorum) for number in range(3)]
    calls = [lambda i=i: i.start.choose_iteration(held[i.island], all_below) for i in islands]
    assert _together(*calls) == [iteration] * 3
    for island in islands:
        island.leave()


def test_too_few_islands_go_on_from_no_checkpoint() -> None:
    """One that does not come is named."""
    late = choose_iteration({0: [20]}, StartLimits(2, 1, 5.0), 30)
    assert late.problem.startswith("island 1 did not come within 5 s")
    assert choose_iteration({0: [20]}, StartLimits(2, 1, 5.0), 0).iteration == 20
    assert choose_iteration({0: [20], 1: []}, StartLimits(3, 2, 5.0), 0).iteration == 20
    assert choose_iteration({0: [20], 1: []}, StartLimits(3, 2, 5.0), 30).problem.startswith("island 2 did not come")


@pytest.mark.parametrize("decides", [0, 1])
def test_whether_all_are_needed_is_what_those_ahead_say(port: int, decides: int) -> None:
    """Island 0 is past the steps in step and goes on alone; the other is behind and joins, whoever decides."""
    pair = [_island(port, number, 2, 1) for number in range(2)]

    def begin(island: Islands) -> bool:
        time.sleep(0.0 if island.island == decides else 0.4)
        return island.begin_generation(9 if island.island == 0 else 3, island.island == 1, {}, str(island.island))

    assert _together(*(lambda i=i: begin(i) for i in pair)) == [True, False]


def test_of_two_that_wait_to_join_as_the_same_island_the_first_ends(port: int) -> None:
    one, two, three = (_island(port, number, 2, 1) for number in (0, 1, 1))
    assert _together(lambda: one.begin_generation(5, False, {}), lambda: two.begin_generation(3, False, {})) == [
        True,
        False,
    ]
    found: list[Any] = []
    waits = threading.Thread(target=lambda: found.extend(_together(two.request_to_join)))
    waits.start()
    while not one.store.get("joining/1"):
        time.sleep(0.02)
    three.store.take_generation(1)
    three._take_ticket()
    waits.join(20)
    assert isinstance(found[0], UserError)
    assert "another process waits to join as island 1" in str(found[0])


@pytest.mark.parametrize("in_step", [False, True])
def test_all_agree_on_who_is_behind_and_whether_they_go_in_step(port: int, in_step: bool) -> None:
    """Those that are furthest say whether they do."""
    islands = [_island(port, number, 3, 3) for number in range(3)]
    calls = [
        lambda i=i: i.begin_generation(5 if i.island else 0, in_step or not i.island, {}, str(i.island > 0))
        for i in islands
    ]
    assert _together(*calls) == [False, True, True]
    assert [(island.expected, island.behind, island.starts_synchronously) for island in islands] == [
        ((1, 2), (0,), in_step)
    ] * 3
    assert [island.lets_in for island in islands] == [False, True, False]
    assert islands[2]._awaited() == {0, 1, 2}
    for island in islands:
        island.leave()


def test_an_island_that_is_behind_joins(port: int) -> None:
    one, two = (_island(port, number, 2, 1) for number in range(2))
    assert _together(lambda: one.begin_generation(5, False, {}), lambda: two.begin_generation(3, False, {})) == [
        True,
        False,
    ]
    two.expected = ()  # as one that was started again

    def go_on() -> list[tuple[int, int]]:
        time.sleep(0.3)  # the other one asks first
        decision = one.report_to_round("6/0", RoundReport(1.0, 1.0))
        assert decision.members == (0,)
        assert one.decide_outcome("6/0", decision.members, GOOD) is RoundOutcome.COUNTS
        return one.admit_islands()

    let_in, answer = _together(go_on, two.request_to_join)
    assert let_in == [(1, 1)]
    assert answer[0] == 1
    assert (answer[1].source, answer[1].round) == (0, "6/0")
    # From the next round on they are two, whichever comes first.
    for key, first in (("7/0", two), ("8/0", one)):

        def come(island: Islands, key: str = key, first: Islands = first) -> Decision:
            time.sleep(0.0 if island is first else 0.4)
            return island.report_to_round(key, RoundReport(1.0, 1.0))

        found = _together(*(lambda i=i, come=come: come(i) for i in (one, two)))
        assert [d.members for d in found] == [(0, 1)] * 2
        assert (
            _together(*(lambda i=i, key=key: i.decide_outcome(key, (0, 1), GOOD) for i in (one, two)))
            == [RoundOutcome.COUNTS] * 2
        )


def test_an_island_that_does_not_come_to_the_start_ends_or_spares_the_others(port: int) -> None:
    """By the quorum, after the time limit."""
    alone = Islands(IslandStore("127.0.0.1", port, 10.0), 0, 2, 2, 1.0, 0.3, None)
    with pytest.raises(UserError, match=r"^island 1 did not come within 0.3 s .*; start all of them, or lower the quo"):
        alone.begin_generation(0, False, {})
    alone.leave()
    alone.store.end_generation(1)
    spared = Islands(IslandStore("127.0.0.1", port, 10.0), 0, 2, 1, 1.0, 0.3, None)
    assert spared.begin_generation(0, False, {}) is True
    assert spared.expected == (0,)
    spared.leave()


def test_an_island_whose_launcher_has_ended_is_not_waited_for(port: int) -> None:
    """Unless it comes all the same."""

    def start(number: int) -> starting.IslandStart:
        place = IslandStore("127.0.0.1", port, 10.0)
        return starting.IslandStart(place, number, StartLimits(2, 2, 30.0), lambda call: call(), _ignore)

    one, two = start(0), start(1)
    one.store.note_end(1)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^island 1 did not come .*, or ended before; start all of them"):
        one.choose_iteration([], 0)
    assert time.monotonic() - began < 5
    one.store.end_generation(1)
    pair = [start(0), start(1)]
    two.store.take_generation(2)

    def come(each: starting.IslandStart) -> int | None:
        time.sleep(0.0 if each.island else 0.5)
        return each.choose_iteration([7], 0)

    assert _together(*(lambda each=each: come(each) for each in pair)) == [7, 7]
    for each in (one, *pair):
        each.store.stop_beating()


def test_islands_whose_start_failed_may_begin_another_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that a launcher starts again, at a meeting place that has outlived them."""
    monkeypatch.setattr(starting, "SILENT_SECONDS", 2.0)

    def start(number: int, seconds: float) -> starting.IslandStart:
        place = IslandStore("127.0.0.1", port, 10.0)
        return starting.IslandStart(place, number, StartLimits(2, 2, seconds), lambda call: call(), _ignore)

    alone = start(0, 0.3)
    with pytest.raises(UserError, match="island 1 did not come"):
        alone.choose_iteration([100], 0)
    alone.store.stop_beating()
    both = [start(number, 30.0) for number in range(2)]
    assert _together(*(lambda each=each: each.choose_iteration([100], 0) for each in both)) == [100, 100]
    for each in both:  # and die before they have begun
        each.store.stop_beating()
    both = [start(number, 30.0) for number in range(2)]
    assert _together(*(lambda each=each: each.choose_iteration([90], 0) for each in both)) == [90, 90]
    for each in both:
        each.store.stop_beating()


def test_who_is_silent_or_waits_to_join_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the time limit is far away; an island of other flags is not let in, and only the first member lets in."""
    monkeypatch.setattr(HeartbeatMonitor.silent, "__defaults__", (2.0,))
    assert SILENT_SECONDS == 10
    one, two, three = (_island(port, number, 3, 1, seconds=25.0) for number in range(3))
    assert (
        _together(*(lambda i=i: i.begin_generation(5, False, {"--lr": "1"}) for i in (one, two, three))) == [True] * 3
    )
    three.leave()
    began = time.monotonic()
    found = _together(*(lambda i=i: i.report_to_round("6/0", RoundReport(1.0, 0.0)) for i in (one, two)))
    assert [d.members for d in found] == [(0, 1)] * 2
    assert time.monotonic() - began < 20
    assert (
        _together(*(lambda i=i: i.decide_outcome("6/0", (0, 1), GOOD) for i in (one, two))) == [RoundOutcome.COUNTS] * 2
    )
    again = _island(port, 2, 3, 1, seconds=25.0)
    again.store.take_generation(1)
    again._identity = {"--lr": "2"}
    asked: list[Any] = []
    waits = threading.Thread(target=lambda: asked.extend(_together(again.request_to_join)))
    waits.start()
    while not one.store.get("joining/2"):
        time.sleep(0.02)
    assert two.admit_islands() == []
    assert one.store.get("welcome/1") is None
    assert one.admit_islands() == []
    waits.join(20)
    assert isinstance(asked[0], UserError)
    assert "island 2 and the others do not agree: --lr is 2 and 1" in str(asked[0])
    # Island 1 dies in its own steps, and waits to come back long before it would be silent.
    monkeypatch.setattr(HeartbeatMonitor.silent, "__defaults__", (100.0,))
    two._take_ticket()
    began = time.monotonic()
    assert one.report_to_round("7/0", RoundReport(1.0, 0.0)).members == (0,)
    assert time.monotonic() - began < 5
    for island in (one, two):
        island.leave()


def test_a_generation_that_nobody_is_left_of_ends(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "SILENT_SECONDS", 3.0)
    first = [_island(port, number, 2, 2) for number in range(2)]
    assert _together(*(lambda i=i: i.begin_generation(0, True, {}) for i in first)) == [True, True]
    first[0].store.put("local", True)  # they go in step no more, so that another one may join
    with pytest.raises(UserError, match="--island 0: there is an island 0 already; give each its own number"):
        _island(port, 0, 2, 2).begin_generation(0, True, {})
    first[1].leave()
    again = _island(port, 1, 2, 2)
    assert again.begin_generation(0, True, {}) is False  # the other one is alive
    for island in first:
        island.leave()
    second = [_island(port, number, 2, 2) for number in range(2)]
    assert _together(*(lambda i=i: i.begin_generation(4, True, {}) for i in second)) == [True, True]
    assert [island.store.generation for island in second] == [2, 2]
    for island in second:
        island.leave()


def test_an_island_that_is_late_learns_where_the_state_of_the_others_is(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for islands that never come; one with that state may begin a longer run."""
    monkeypatch.setattr(starting, "SILENT_SECONDS", 1.0)
    pair = [_island(port, number, 2, 1) for number in range(2)]
    assert _together(*(lambda i=i: i.begin_generation(700, False, {}) for i in pair)) == [True, True]
    pair[1].leave()
    assert pair[0].report_to_round("1200/0/0", RoundReport(1.0, 1.0)).members == (0,)
    assert pair[0].decide_outcome("1200/0/0", (0,), GOOD) is RoundOutcome.COUNTS
    assert pair[0].announce_end(1200, "/runs/saved/island_0") == [1]
    assert pair[0].still_late()
    pair[0].leave()
    late = [750, 500]
    told: list[str] = []
    again = _island(port, 1, 2, 1, tell=told.append)
    with pytest.raises(
        UserError, match=r"^island 0 has come to the end, iteration 1200, and island 1 is late, at 750; "
    ):
        again.start.choose_iteration(late, 0)
    assert told[0].startswith("waiting for island 0 of the run before to end, 5 s at most")
    with pytest.raises(
        UserError, match=r"its last checkpoint is in /runs/saved/island_0: copy it to this island's fol"
    ):
        _island(port, 1, 2, 1).start.choose_iteration(late, 0)
    longer = _island(port, 1, 2, 1, tell=told.append)
    assert longer.start.choose_iteration([1200, *late], 0) == 1200
    assert told[-1] == "waiting for island 0 to come to the start, 5 s at most"
    longer.leave()


def test_waiting_says_for_whom_and_how_long(port: int) -> None:
    told: list[str] = []
    pair = [_island(port, number, 2, 1, 4.0, told.append if number == 0 else _ignore) for number in range(2)]
    _together(*(lambda i=i: i.begin_generation(0, False, {}) for i in pair))
    assert told == []
    pair[1].leave()
    pair[0].report_to_round("1/0", RoundReport(1.0, 1.0))
    assert told == ["waiting for island 1 to come to a round, 4 s at most"]
    pair[0].leave()
