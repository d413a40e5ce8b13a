"""The tests of several ranks on one GPU, tried over gloo: their processes and comparisons."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import test_ranks_layouts as gpu_layouts
from tests.support.cli import REPO
from tests.support.corpus import tiny_flags
from tests.support.device import VARIABLE, rank_variables
from tests.support.one_gpu import turn_on_the_gpu
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.multiprocess


def test_pipelines_of_the_gpu_tests_run_on_the_cpu() -> None:
    gpu_layouts.test_pipelines_run_from_cold_processes("pp2 interleaved")
    gpu_layouts.test_pipelines_without_codecs_run_from_cold_processes("pp2 interleaved")


def test_layers_are_compiled_on_a_gpu_only_where_a_test_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--compile" not in tiny_flags(tmp_path)
    monkeypatch.setenv(VARIABLE, "cuda")
    compiled: dict[str, dict[str, Any]] = {"training": {"compile": "on"}}
    assert [tiny_config(changes, 1).training.compile for changes in ({}, compiled)] == ["off", "on"]
    flags = tiny_flags(tmp_path)
    assert flags[flags.index("--compile") + 1] == "off"


def test_timed_tests_are_alone_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    order: list[str] = []

    def take(alone: bool, name: str) -> None:
        with turn_on_the_gpu(alone):
            order.append(name)

    def started(alone: bool, name: str) -> threading.Thread:
        thread = threading.Thread(target=take, args=(alone, name))
        thread.start()
        thread.join(0.5)
        return thread

    with turn_on_the_gpu(alone=False):
        beside, timed = started(False, "beside"), started(True, "alone")
        assert order == ["beside"]
    for thread in (beside, timed):
        thread.join(10)
    assert order == ["beside", "alone"]
    with turn_on_the_gpu(alone=True):
        late = started(False, "late")
        assert order == ["beside", "alone"]
    late.join(10)
    assert order[2:] == ["late"]


def test_ranks_on_one_gpu_are_separate_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_variables(0) == {}
    monkeypatch.setenv(VARIABLE, "cuda")
    first, second = rank_variables(0), rank_variables(1)
    assert first.pop("NCCL_HOSTID") != second.pop("NCCL_HOSTID")
    assert first == second == {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def test_a_launched_script_finds_its_rank_s_variables(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, os, sys\nprint(json.dumps([os.environ['NCCL_HOSTID'], sys.argv]))\n")
    command = [sys.executable, "tests/support/share_gpu.py", str(script), "--flag"]
    env = {"RANK": "3", VARIABLE: "cuda", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["rank-3", [str(script), "--flag"]]


def _backend() -> str:
    return str(dist.get_backend())


@pytest.mark.skipif(torch.cuda.is_available(), reason="would use the device")
def test_ranks_of_the_gpu_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, _backend) == ["gloo", "gloo"]
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(AssertionError, match=r"(?i)cuda|nccl"):
        run_ranks(2, _backend)
