"""Reachability of a run's ports and its consequences: docs/guides/security.md is true."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.lab.removal import kill
from tests.support.cli import REPO
from tests.support.corpus import tiny_flags
from tests.support.machines import Machine, two_machines
from tests.support.warm import INTERPRETER

pytestmark = pytest.mark.multiprocess

SCRIPT = "pretrain_gpt.py"
LOOPBACK = {"127.0.0.1", "::1"}
PORT = 29517
START_SECONDS = 120.0
SETTLE_SECONDS = 1.0
"""Ten times the interval at which the launcher looks at its store."""


class Bomb:
    """An object that makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as machines_pair:
        yield machines_pair


def _wait_for(
    condition: Callable[[], object], processes: list[subprocess.Popen[bytes]], story: Callable[[], str]
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, story()
        assert all(process.poll() is None for process in processes), story()
        time.sleep(0.1)


def _page() -> dict[str, tuple[str, str]]:
    """The table of the page: the addresses of each port on a single machine, and on several."""
    rows = [
        line.strip("| ").split(" | ")
        for line in (REPO / "docs/guides/security.md").read_text().splitlines()
        if " | " in line
    ]
    return {row[0]: (row[1], row[2]) for row in rows[1:]}


def test_the_page_lists_loopback_for_everything_on_one_machine() -> None:
    """The listing below checks these ports, and all ports on several machines."""
    page = _page()
    assert len(page) == 7
    assert all("loopback" in text for text, _ in page.values())
    assert {several for _, several in page.values()} == {
        "`--master-addr` of the first machine",
        "address of the machine",
        "`--serve-islands` of one machine",
        "the same, on the first rank's machine",
    }


def test_values_in_the_launchers_store_are_not_unpickled(tmp_path: Path) -> None:
    mark, script, out = tmp_path / "mark", tmp_path / "wait.py", tmp_path / "out"
    script.write_text("import os, time\nprint('PORT', os.environ['MASTER_PORT'], flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "tools/launch.py", "--nproc-per-node", "1", "--monitor-interval", "0.1", str(script)]
    with out.open("wb") as file:
        launcher = subprocess.Popen(command, cwd=REPO, stdout=file, stderr=file)
    try:
        _wait_for(lambda: "PORT" in out.read_text(), [launcher], out.read_text)
        keys: dict[int, list[str]] = {}
        ports = {int(re.findall(r"PORT (\d+)", out.read_text())[0]), *_ports_of(launcher.pid)}
        for port in ports:
            with suppress(RuntimeError):  # of a launcher that it has ended
                store: Any = dist.TCPStore(
                    "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
                )
                keys[port] = store.list_keys()
                for value in (b64encode(pickle.dumps(Bomb(mark))), pickle.dumps(Bomb(mark))):
                    for key in keys[port]:
                        store.set(key, value)
                    time.sleep(SETTLE_SECONDS / 2)
        assert any(keys.values())
        time.sleep(SETTLE_SECONDS)
        assert not mark.exists()
        assert launcher.poll() is None, out.read_text()
    finally:
        launcher.terminate()
        launcher.wait(30)


def _ports_of(pid: int) -> set[int]:
    """Ports at which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def _iterations(path: Path) -> int:
    return path.read_text().count('"train"') if path.exists() else 0


@pytest.mark.usefixtures("warm")
def test_one_machine_listens_at_loopback_addresses_only(
    prefix: Path, machines: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Islands with all kinds of launchers, with ranks, heartbeats and groups of both kinds."""
    monkeypatch.setattr(sys, "executable", INTERPRETER)  # an island's launcher is a child of that of all islands
    machine = machines[0]
    flags = tiny_flags(
        prefix,
        train_iters=100_000,
        pipeline_model_parallel_size=2,
        log_json_file=tmp_path / "log.jsonl",
        tensorboard_dir=tmp_path / "tensorboard",
        compress=["outer=fixpoint,bits=4,every=2,warmup=1"],
    )
    out = tmp_path / "out"
    words = ["tools/launch.py", "--islands", 2, "--nproc-per-node", 4, SCRIPT, *flags]
    process = machine.start(words, out)
    try:
        _wait_for(lambda: len(list(tmp_path.glob("*.jsonl"))) == 2, [process], out.read_text)
        _wait_for(lambda: all(_iterations(path) > 2 for path in tmp_path.glob("*.jsonl")), [process], out.read_text)
        listening = machine.listening()
        # A meeting place, two stores; of each rank a port for heartbeats and a port for each user of gloo.
        assert len(listening) >= 3 + 4 * 2
        assert {address for address, _ in listening} <= LOOPBACK
    finally:
        kill([machine.name])


@pytest.mark.usefixtures("warm")
def test_several_machines_listen_at_their_own_addresses_only(
    prefix: Path, machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = machines
    log = tmp_path / "log.jsonl"
    flags = tiny_flags(prefix, train_iters=100_000, pipeline_model_parallel_size=2, log_json_file=log)
    rendezvous = ["--nnodes", 2, "--master-addr", first.address, "--master-port", PORT, "--nproc-per-node", 1]
    outs = [tmp_path / "out0", tmp_path / "out1"]
    processes = []
    try:
        for node, (machine, out) in enumerate(zip(machines, outs, strict=True)):
            words = ["tools/launch.py", *rendezvous, "--node-rank", node, SCRIPT, *flags]
            processes.append(machine.start(words, out))
        _wait_for(lambda: _iterations(log) > 2, processes, lambda: "\n".join(out.read_text() for out in outs))
        first_sockets, second_sockets = first.listening(), second.listening()
        assert (first.address, PORT) in first_sockets
        assert {address for address, _ in first_sockets} == {first.address}
        assert {address for address, _ in second_sockets} == {second.address}
        assert len(first_sockets) == len(second_sockets) + 1, "the store"
    finally:
        kill([machine.name for machine in machines])


@pytest.mark.usefixtures("warm")
def test_rank_0_without_a_launcher_serves_the_store_at_its_address(
    prefix: Path, machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    flags = tiny_flags(prefix, train_iters=100_000, pipeline_model_parallel_size=2, log_json_file=log)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    outs = [tmp_path / "out0", tmp_path / "out1"]
    processes = []
    try:
        for rank, out in enumerate(outs):
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(machines[1].start([SCRIPT, *flags], out, env))
        _wait_for(lambda: _iterations(log) > 2, processes, lambda: "\n".join(out.read_text() for out in outs))
        listening = machines[1].listening()
        assert ("127.0.0.1", PORT) in listening
        assert {address for address, _ in listening} <= LOOPBACK
    finally:
        kill([machine.name for machine in machines])


def test_the_server_listens_at_its_given_address() -> None:
    from megatron.inference.serve_command import ServerFlags, listen

    with listen(ServerFlags(port=0)) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
