"""Checks of a run's files and memory on its machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.base.errors import UserError
from megatron.config.flags import parse_args
from megatron.distributed.process_group import LaunchEnvironment
from megatron.training import machine_check
from megatron.training.machine_check import check_machine, check_room, machine_notes
from tests.support.corpus import tiny_flags

ENVIRONMENT = LaunchEnvironment(0, 1, 0)


def _check(*flags: str) -> None:
    check_machine(parse_args([*tiny_flags(Path("data")), *flags]).resolve(1), ENVIRONMENT)


def test_an_ordinary_run_passes(tmp_path: Path) -> None:
    _check("--kill-switch-file", str(tmp_path / "stop"))


def test_an_existing_kill_switch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with pytest.raises(UserError, match=r"--kill-switch-file .*stop exists already.*remove it first"):
        _check("--kill-switch-file", str(tmp_path / "stop"))


@pytest.mark.parametrize("name", ["/proc/x", "/dev/null", "/dev/null/x", "/sys", "file"])
def test_a_folder_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = ("--sample-order", "fixed", "--compress", f"pp-forward=delta,memory=4,folder={tmp_path / name}")
    with pytest.raises(UserError, match=f"pp-forward=delta: folder=.*{name}: cannot be written.*name a folder"):
        _check(*flags)
    _check(*flags[:-1], f"pp-forward=delta,memory=4,folder={tmp_path / 'new' / 'folder'}")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "memory_of_this_machine", lambda: 400_000)
    config = parse_args(tiny_flags(Path("data"))).resolve(4)
    check_room(config, LaunchEnvironment(0, 4, 0))
    with pytest.raises(UserError, match="100 kB are available on this machine for each of its 4 ranks"):
        check_room(config, LaunchEnvironment(0, 4, 0, 4))


def test_ranks_of_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the GPU, the memory needed, and flags that help."""
    gpu = SimpleNamespace(total_memory=300_000, name="NVIDIA Small")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    config = parse_args([*tiny_flags(Path("data")), "--distributed-backend", "nccl"]).resolve(4, cuda_available=True)
    check_room(config, LaunchEnvironment(0, 4, 0))
    check_room(config, LaunchEnvironment(0, 4, 0, 2))
    flags = "--tensor-model-parallel-size, --pipeline-model-parallel-size, --use-distributed-optimizer"
    with pytest.raises(
        UserError, match=rf"at least .* 100 kB are available on its GPU \(NVIDIA Small\) for each.*{flags}"
    ):
        check_room(config, LaunchEnvironment(0, 6, 0, 6))
    gpu.total_memory = 100_000
    with pytest.raises(UserError, match=r"100 kB are available on its GPU \(NVIDIA Small\);"):
        check_room(config, LaunchEnvironment(0, 4, 0))


def test_8_bit_products_need_a_recent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--bf16", "--fp8", "rowwise", "--distributed-backend", "nccl"]
    config = parse_args([*tiny_flags(Path("data")), *flags]).resolve(1, cuda_available=True)
    gpu = SimpleNamespace(total_memory=10**12, name="NVIDIA Large")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device == 0 else (8, 0))
    check_machine(config, LaunchEnvironment(0, 1, 0))
    with pytest.raises(
        UserError, match=r"^--fp8 rowwise: GPU 1 has compute capability 8\.0.* need 8\.9.*; leave it out"
    ):
        check_machine(config, LaunchEnvironment(1, 2, 1, 2))


@pytest.mark.parametrize(
    ("setting", "flags", "local_ranks", "noted"),
    [
        ("1", [], 1, True),
        ("0", [], 1, False),
        (None, [], 1, False),
        ("1", [], 2, False),  # both ranks on this node
        ("1", ["--pipeline-model-parallel-size", "1"], 1, False),
        ("1", ["--distributed-backend", "nccl"], 1, False),
    ],
)
def test_slow_starts_of_tcp_are_noted_where_stages_are_on_several_nodes(
    setting: str | None,
    flags: list[str],
    local_ranks: int,
    noted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "tcp_slow_start_after_idle"
    if setting is not None:
        path.write_text(f"{setting}\n")
    monkeypatch.setattr(machine_check, "SLOW_START", path)
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    words = [*tiny_flags(Path("data")), "--pipeline-model-parallel-size", "2", *flags]
    environment = LaunchEnvironment(0, 2, 0, local_ranks)
    notes = machine_notes(parse_args(words).resolve(2, cuda_available=True), environment, None)
    assert len(notes) == noted
    assert all("sysctl -w net.ipv4.tcp_slow_start_after_idle=0" in note for note in notes)
    if "nccl" in flags:
        monkeypatch.setenv("NCCL_IB_DISABLE", "1")
        assert machine_notes(parse_args(words).resolve(2, cuda_available=True), environment, None)
