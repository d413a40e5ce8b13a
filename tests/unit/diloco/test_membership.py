"""Rounds of islands, and islands that leave and join."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.diloco.membership import Islands
from megatron.diloco.round_decision import (
    RoundOutcome,
    RoundReport,
    Vote,
)
from megatron.diloco.startup import QuorumError
from megatron.diloco.store import SILENT_SECONDS, HeartbeatMonitor
from megatron.distributed.errors import CommunicationError
<<<<<<< HEAD
from tests.unit.diloco.support import GOOD, MakeIslands, each, together
=======
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
    groups = _together(*(lambda i=i: i.make_group((0, 1), "pair", 5.0) for i in pair))
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
>>>>>>> 1e8a88d (Islands, optimizer, training, models, checkpoints and run configuration: prose in plain sentences, functions named by verbs)


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
    third.store.take_generation(1)
    third._take_ticket()
    waits.join(20)
    assert isinstance(results[0], UserError)
    assert "another process waits to join as island 1" in str(results[0])


<<<<<<< HEAD
def test_a_late_island_joins(make_islands: MakeIslands) -> None:
    ahead, late = make_islands(2, 1)
    assert each((ahead, late), lambda i: i.begin_generation(3 if i is late else 5, False, {})) == [True, False]
    late.expected = ()  # like a restarted island
=======
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
    assert [island.admits_islands for island in islands] == [False, True, False]
    assert islands[2]._awaited_islands() == {0, 1, 2}
    for island in islands:
        island.leave()


def test_an_island_that_is_behind_joins(port: int) -> None:
    one, two = (_island(port, number, 2, 1) for number in range(2))
    assert _together(lambda: one.begin_generation(5, False, {}), lambda: two.begin_generation(3, False, {})) == [
        True,
        False,
    ]
    two.expected = ()  # as one that was started again
>>>>>>> 1e8a88d (Islands, optimizer, training, models, checkpoints and run configuration: prose in plain sentences, functions named by verbs)

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
    monkeypatch.setattr(HeartbeatMonitor.silent, "__defaults__", (2.0,))
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
    again.store.take_generation(1)
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
    monkeypatch.setattr(HeartbeatMonitor.silent, "__defaults__", (100.0,))
    second._take_ticket()
    began = time.monotonic()
    assert first.report_to_round("7/0", RoundReport(1.0, 0.0)).members == (0,)
    assert time.monotonic() - began < 5


def test_a_line_names_missing_islands_and_the_time_limit(make_islands: MakeIslands) -> None:
    lines: list[str] = []
    pair = make_islands(2, 1, seconds=4.0, tell=lines.append)
    each(pair, lambda i: i.begin_generation(0, False, {}))
    assert lines == []
    pair[1].leave()
    pair[0].report_to_round("1/0", RoundReport(1.0, 1.0))
    assert lines == ["waiting for island 1 to come to a round, 4 s at most"]
    pair[0].leave()
