"""Failed ranks: every other rank learns which rank failed, and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event

import pytest
import torch.distributed as dist

from megatron.base.start import launcher_pid
from megatron.distributed import health
from megatron.distributed import neighbor_mesh as mesh
from megatron.distributed.health import FailureDetector
from megatron.distributed.neighbor_mesh import LONGEST_LINE, MAX_STRANGERS, Mesh, neighbors

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the heartbeat and other intervals."""
    monkeypatch.setattr(health, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(health, "EXPLAIN_SECONDS", 0.4)
    monkeypatch.setattr(health, "GRACE_SECONDS", 0.2)


class Rank:
    """A watch in this process, which records its exit status instead of ending the process."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        silent_seconds: float = 0.5,
        launcher: int | None = None,
        grace_seconds: float = 0.2,
    ) -> None:
        self.status: int | None = None
        self.left = Event()
        self.watch = FailureDetector(
            rank,
            world_size,
            silent_seconds=silent_seconds,
            launcher=launcher,
            leave=self._leave,
            grace_seconds=grace_seconds,
        )

    def _leave(self, status: int) -> None:
        self.status = status
        self.left.set()

    def hang(self) -> None:
        """Stop like a process under SIGSTOP: connections stay open."""
        self.watch._stop.set()
        self.watch._thread.join()

    def die(self) -> None:
        """End like a process under SIGKILL: connections close."""
        self.hang()
        if self.watch._mesh is not None:
            self.watch._mesh.close()


@contextmanager
def _world(size: int, silent_seconds: float = 0.5, grace_seconds: float = 0.2) -> Iterator[list[Rank]]:
    store = dist.HashStore()
    ranks = [Rank(rank, size, silent_seconds, grace_seconds=grace_seconds) for rank in range(size)]
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.die)
        with ThreadPoolExecutor(size) as pool:  # each waits for the addresses of neighbors
            for done in [pool.submit(rank.watch.start, store, "127.0.0.1", True) for rank in ranks]:
                done.result(20)
        deadline = time.monotonic() + 20
        while any(len(rank.watch._last_heard) < len(neighbors(r, size)) for r, rank in enumerate(ranks)):
            assert time.monotonic() < deadline, "the ranks do not meet"
            time.sleep(0.01)
        yield ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64, 100, 4096])
def test_neighbors_are_symmetric_and_few(size: int) -> None:
    every = [neighbors(rank, size) for rank in range(size)]
    assert all(rank in every[other] for rank in range(size) for other in every[rank])
    assert all(rank not in every[rank] for rank in range(size))
    assert max(map(len, every)) <= 2 * max(size - 1, 0).bit_length()


@pytest.mark.parametrize("failed", [range(8), range(8, 16), (0, 1, 2, 4, 8)])
def test_news_reaches_all_survivors(failed: range) -> None:
    size = 1024
    reached, queue = {20}, [20]
    while queue:
        new = {r for r in neighbors(queue.pop(), size) if r not in failed} - reached
        reached |= new
        queue += new
    assert len(reached) == size - len(failed)


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("way", [Rank.hang, Rank.die])
def test_every_survivor_ends_and_names_the_failed_rank(
    size: int, way: Callable[[Rank], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for victim in {0, size - 1}:
        with _world(size) as ranks:
            way(ranks[victim])
            survivors = [rank for r, rank in enumerate(ranks) if r != victim]
            assert all(rank.left.wait(10) for rank in survivors)
            assert {rank.status for rank in survivors} == {3}
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == len(survivors)
            assert all(f": rank {victim} on {HOST} stopped answering" in line for line in lines), lines
            assert ("no sign of life" in lines[0]) == (way is Rank.hang)


def test_explain_finds_the_failed_rank_and_does_not_end_the_process() -> None:
    with _world(3, silent_seconds=30.0) as ranks:
        assert ranks[1].watch.explain() is None
        ranks[0].hang()
        verdict = ranks[1].watch.explain()
        assert verdict is not None
        assert verdict.startswith(f"rank 0 on {HOST} stopped answering")
        assert ranks[2].watch.explain() == verdict
        assert ranks[1].status is None


def test_a_rank_that_explains_does_not_end_immediately() -> None:
    with _world(3, silent_seconds=30.0, grace_seconds=0.0) as ranks:
        ranks[0].hang()
        assert ranks[1].watch.explain() is not None
        assert ranks[2].left.wait(10)
        assert ranks[1].status is None


def test_the_first_reason_is_sent_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    with _world(9) as ranks:
        ranks[4].watch.report("ValueError: \u00fc" + "x" * 3000 + "\nsecond line")
        ranks[4].die()
        survivors = [rank for r, rank in enumerate(ranks) if r != 4]
        assert all(rank.left.wait(10) for rank in survivors)
        assert all(
            (rank.watch.explain() or "").startswith("rank 4 failed: ValueError: \u00fcxxx") for rank in survivors
        )
        assert max(map(len, capsys.readouterr().err.splitlines())) < LONGEST_LINE


def test_ranks_that_stop_normally_are_not_missed() -> None:
    with _world(4) as ranks:
        ranks[0].watch.stop()
        ranks[3].watch.stop()
        time.sleep(1.0)
        assert ranks[1].watch.explain() is None
        assert not any(rank.left.is_set() for rank in ranks)


def test_a_rank_that_was_stopped_accuses_no_other() -> None:
    """After SIGSTOP and SIGCONT, elapsed time is no evidence against other ranks."""
    with _world(2, silent_seconds=0.4) as ranks:
        ranks[1].watch._silent_beats = 10**6
        with ranks[0].watch._lock:  # blocks the thread
            time.sleep(1.0)
        time.sleep(0.3)
        assert ranks[0].watch._verdict is None
        ranks[1].hang()
        assert ranks[0].left.wait(10)


def test_slow_ranks_have_the_time_of_the_flag() -> None:
    with _world(2, silent_seconds=60.0) as ranks:
        ranks[0].hang()
        assert not ranks[1].left.wait(1.5)


def test_strangers_do_not_disturb_a_listener() -> None:
    with _world(3) as ranks:
        mesh = ranks[0].watch._mesh
        assert mesh is not None
        with ExitStack() as stack:
            for index in range(2 * MAX_STRANGERS):
                link = stack.enter_context(socket.create_connection(mesh._listener.getsockname(), 5))
                link.sendall([b"", b"1 wrong\nnews all is lost\n", b"\xff" * 3 * LONGEST_LINE, b"\n"][index % 4])
            time.sleep(0.5)
            assert len(mesh._strangers) <= MAX_STRANGERS
        assert not any(rank.left.is_set() for rank in ranks)
        assert ranks[0].watch._verdict is None


def test_a_stranger_may_speak_while_it_is_replaced() -> None:
    mesh = Mesh(0, 2, "127.0.0.1", HOST, local=True)
    with ExitStack() as stack:
        stack.callback(mesh.close)
        address = mesh._listener.getsockname()
        links = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(MAX_STRANGERS)]
        while len(mesh._strangers) < MAX_STRANGERS:
            mesh.wait_for_data(1.0)
        stack.enter_context(socket.create_connection(address, 5))
        for link in links:
            link.sendall(b"0 wrong\n")
        time.sleep(0.1)
        for _ in range(4):
            mesh.wait_for_data(0.1)
        assert len(mesh._strangers) <= 1


@pytest.mark.parametrize(
    ("master", "local", "everywhere"),
    [("localhost", False, False), ("127.0.0.1", False, False), ("named", True, False), ("named", False, True)],
)
def test_a_listener_is_reachable_only_where_needed(
    master: str, local: bool, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is a loopback address in /etc/hosts may be another address on other machines."""
    monkeypatch.setattr(mesh, "own_address", lambda master: (socket.AF_INET, "127.0.0.1"))
    node = Mesh(0, 2, master, HOST, local)
    assert node._listener.getsockname()[0] == ("0.0.0.0" if everywhere else "127.0.0.1")
    assert node._address == ("named" if everywhere else "127.0.0.1")
    node.close()


def test_an_unreachable_neighbor_is_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    store = dist.HashStore()
    store.set("neighbor/0", '{"address": "10.9.9.9", "port": 1, "token": "", "host": "far"}')
    monkeypatch.setattr(socket, "create_connection", refuse)
    rank = Rank(1, 2)
    rank.watch.start(store, "127.0.0.1")
    printed = capsys.readouterr().err
    assert "note: rank 1: rank 0 on far cannot be reached at 10.9.9.9:1: [Errno 111] Connection refused" in printed
    rank.watch.stop()


def test_a_worker_ends_with_its_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Rank(0, 1, launcher=os.getppid())
    alone.watch.start()
    assert not alone.left.wait(0.3)
    alone.watch.stop()
    orphan = Rank(0, 1, launcher=0)
    orphan.watch.start()
    assert orphan.left.wait(10)
    assert "rank 0: rank 0 failed: its launcher is gone" in capsys.readouterr().err


def test_only_workers_of_torchrun_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher_pid() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher_pid() == os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launcher_pid() in (0, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_full_pipe_does_not_keep_a_rank_alive() -> None:
    script = (
        "import os, sys\n"
        "from megatron.distributed import health\n"
        "sys.stderr.write('x' * 65536)\n"
        "health.FailureDetector(0, 1, launcher=0).start()\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(60) == 3
        finally:
            process.kill()
