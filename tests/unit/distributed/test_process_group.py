"""Environment variables of launchers, and the rendezvous."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.base.errors import UserError
from megatron.distributed.errors import CommunicationError
from megatron.distributed.process_group import (
    LaunchEnvironment,
    init_process_group,
    open_queues,
    open_rendezvous_store,
    pick_device,
    write_error_file,
)
from megatron.training.program import run_program
from tests.support.machines import debian

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*VARIABLES, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)


def _read(
    monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str], local_rank: int | None = None
) -> tuple[int, int, int]:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    environment = LaunchEnvironment.read(local_rank)
    return environment.rank, environment.world_size, environment.local_rank


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}


@pytest.mark.parametrize(
    ("env", "flag", "rank"),
    [
        (TORCHRUN, None, (5, 8, 1)),
        ({**SRUN, **TORCHRUN}, None, (5, 8, 1)),  # a task of srun per node starts torchrun
        (SRUN, None, (3, 4, 1)),
        ({**SRUN, "WORLD_SIZE": "8"}, None, (3, 8, 1)),
        (BATCH_STEP, None, (0, 1, 0)),  # a batch script without srun
        ({}, None, (0, 1, 0)),
        ({"RANK": "3"}, None, (0, 1, 0)),
        ({}, 2, (0, 1, 2)),
        (SRUN, 2, (3, 4, 2)),  # the flag --local-rank has priority over Slurm only
        (TORCHRUN, 2, (5, 8, 1)),
    ],
)
def test_a_rank_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str], flag: int | None, rank: tuple[int, int, int]
) -> None:
    assert _read(monkeypatch, env, flag) == rank


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("rack[07-09,12],login", "rack07"),
        ("a[3]", "a3"),
        ("a[03,07-09]-ib,b1", "a03-ib"),
    ],
)
def test_a_failed_rendezvous_names_the_address(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    """Without MASTER_ADDR, ranks of srun open_rendezvous_store at the first node of the step."""
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    monkeypatch.setenv("MASTER_PORT", "no-port")
    env = LaunchEnvironment(rank=1, world_size=2, local_rank=0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(CommunicationError, match=f"rank 1 of 2 cannot join the process group at {first}:no-port"):
        init_process_group(env, "gloo", 0.1)
    monkeypatch.delenv("MASTER_ADDR")


@pytest.mark.parametrize("launchers", ["True", ""])
def test_an_unresponsive_listener_is_an_error_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, launchers: str
) -> None:
    for name in ("_SPARE_SECONDS", "QUIET_SECONDS"):
        monkeypatch.setattr(f"megatron.distributed.store.{name}", 0.2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launchers)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        start = time.monotonic()
        problem = (
            "what listens there has not answered as a rendezvous does in 1 s: another service, or a process that hangs?"
        )
        message = f"rank 1 of 2 cannot join the process group at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): {problem}"
        with pytest.raises(CommunicationError, match=re.escape(message)):
            init_process_group(LaunchEnvironment(1, 2, 1), "gloo", 0.8 / 60)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loopback_master_address_is_refused_immediately(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    debian(monkeypatch)
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "debian", "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megatron.training.program._RANK_0_PRINTS_SECONDS", 0.0)
    began = time.monotonic()
    assert run_program(lambda ranks: ranks.join("gloo", 0.2, {})) == 2
    assert time.monotonic() - began < 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: debian is a loopback address on this machine, where no other machine reaches it; ")
    assert "set MASTER_ADDR to the address that others use, or LOCAL_WORLD_SIZE" in line


def test_ranks_of_a_single_machine_meet_at_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its address is; and so do ranks of a launcher, which serves the store at other addresses as well."""
    debian(monkeypatch)
    monkeypatch.setenv("MASTER_ADDR", "debian")
    with socket.create_server(("127.0.1.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    open_rendezvous_store(LaunchEnvironment(0, 2, 0, local_world_size=2), 0.1)
    reached: list[str] = []

    def connect(host: str, port: int, seconds: float) -> dist.Store:
        reached.append(host)
        return dist.HashStore()

    monkeypatch.setattr("megatron.distributed.process_group.connect_store", connect)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    open_rendezvous_store(LaunchEnvironment(0, 2, 0, local_world_size=1), 0.1)
    assert reached == ["debian"]


@pytest.mark.parametrize(("nodes", "local"), [("1", 4), ("2", None)])
def test_ranks_of_srun_know_whether_all_are_on_a_single_machine(
    nodes: str, local: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in {**SRUN, "SLURM_STEP_NUM_NODES": nodes}.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnvironment.read().local_world_size == local


def test_the_reason_is_written_to_the_error_file_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_error_file("nobody asked")
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file("rank 1 failed: ValueError: bad\nmore")
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(path))
    printed = ChildFailedError("x", {1: failure}).format_msg()
    assert printed.splitlines()[-2] == "  traceback : rank 1 failed: ValueError: bad"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "folder"))
    write_error_file("a disk that is full changes nothing")


def test_gloo_runs_on_the_cpu() -> None:
    assert pick_device("gloo", 3) == torch.device("cpu")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "abc", "RANK": "0"}, "WORLD_SIZE is 'abc', not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '', not a number"),
        ({"WORLD_SIZE": "\u0662"}, "WORLD_SIZE is .*, not a number"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9*', not a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; start at least one"),
        ({"WORLD_SIZE": "-2", "RANK": "0"}, "WORLD_SIZE is -2"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is -1, but the ranks of WORLD_SIZE 2 are 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2"),
        ({**TORCHRUN, "LOCAL_RANK": "1000000000"}, "LOCAL_RANK .* is 1000000000"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK .* is -1"),
        ({**TORCHRUN, "MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', not a number"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT is 65536; ports are"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
    ],
)
def test_invalid_variables_are_refused(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        _read(monkeypatch, env)
    assert len(str(caught.value)) < 200


@given(
    st.fixed_dictionaries(
        {}, optional={name: st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.integers(
            -(10**30), 10**30).map(str) for name in (*VARIABLES[:3], "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID")}
    ),
    st.none() | st.integers(-(10**30), 10**30),
)  # fmt: skip
def test_any_environment_is_a_rank_or_an_error_of_one_line(env: dict[str, str], local_rank: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            environment = LaunchEnvironment.read(local_rank)
        except UserError as error:
            message = str(error)
        else:
            message = "a rank"
            assert 0 <= environment.rank < environment.world_size
            assert 0 <= environment.local_rank < 1 << 16
    assert len(message.splitlines()) == 1


def test_an_invalid_environment_ends_a_program_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "four")
    assert run_program(lambda ranks: pytest.fail("it began")) == 2
    assert capsys.readouterr().err == "error: the environment variable WORLD_SIZE is 'four', not a number; correct it\n"


@pytest.mark.parametrize(
    ("setting", "used", "noted"), [(None, "32", False), ("1", "32", True), ("x", "32", True), ("16", "16", False)]
)
def test_streams_have_separate_hardware_queues(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, used: str, noted: bool
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(name, setting)
    note = open_queues()
    assert os.environ[name] == used
    assert (note is not None and f"not {setting}:" in note) == noted


@pytest.mark.parametrize(
    ("env", "node"),
    [
        ({**TORCHRUN, "GROUP_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "2"),
        ({**TORCHRUN, "SLURM_NODEID": "7"}, socket.gethostname()),
        ({**SRUN, "SLURM_NODEID": "7"}, "7"),
        (SRUN, socket.gethostname()),
        ({}, socket.gethostname()),
    ],
    ids=str,
)
def test_a_rank_knows_its_node(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], node: str) -> None:
    """By variables of its launcher; a shell in a Slurm job has variables of Slurm as well."""
    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnvironment.read().node == node
