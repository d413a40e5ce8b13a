"""Freed memory that the process keeps, so that the next step has no page faults."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest

from megatron.base.memory import keep_freed_memory
from megatron.training import pretrain
from megatron.training.program import Ranks
from tests.support.tiny import tiny_config

STEPS = """
import ctypes, resource, torch
from megatron.base.memory import keep_freed_memory

class Info(ctypes.Structure):  # of glibc's mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
info, take, give = libc.mallinfo2, libc.malloc, libc.free
info.restype, take.restype, give.argtypes = Info, ctypes.c_void_p, [ctypes.c_void_p]
keeps = {keeps} and keep_freed_memory()
block, heap = take(30 << 20), info().arena
give(block)
kept = info().arena == heap
from_system = info().hblks
block = torch.empty(31 << 18)  # 31 MiB
from_system = info().hblks - from_system
del block
for _ in range(6):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(6 << 20) for _ in range(6)]  # 24 MiB each
    del blocks
print(keeps, from_system, kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""
BYTES = 6 * 24 << 20
"""Bytes of the blocks of a step, in pages of at least 4 KiB."""


def _printed(keeps: bool) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "GLIBC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(keeps=keeps)], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="measures glibc's heap")
def test_memory_freed_by_a_step_is_reused_by_the_next() -> None:
    assert _printed(keeps=False)[:2] == ["False", "1"]
    *facts, faults = _printed(keeps=True)
    assert facts == ["True", "0", "True"]
    assert int(faults) < BYTES / 4096 / 50


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Recorded calls of mallopt, which do not change this process."""
    calls: list[tuple[int, int]] = []

    def mallopt(name: int, value: int) -> int:
        calls.append((name, value))
        return 1

    for name in [name for name in os.environ if "MALLOC" in name or "GLIBC" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    return calls


def test_glibc_keeps_freed_memory(settings: list[tuple[int, int]]) -> None:
    assert keep_freed_memory()
    assert settings == [(-3, 32 << 20), (-1, 2**31 - 1)]


@pytest.mark.parametrize("library", [SimpleNamespace(), SimpleNamespace(mallopt=lambda name, value: 0)])
def test_other_c_libraries_are_not_changed(
    library: SimpleNamespace, settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert not keep_freed_memory()


@pytest.mark.parametrize(
    "name", ["GLIBC_TUNABLES", *(f"MALLOC_{n}_" for n in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX"))]
)
def test_settings_of_the_environment_have_priority(
    name: str, settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory()
    assert not settings


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_training_on_cpus_keeps_freed_memory(backend: Literal["gloo", "nccl"], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    calls: list[str] = []
    monkeypatch.setattr(pretrain, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(pretrain, "check_machine", stop)
    config = tiny_config({}, 1)
    config = replace(config, parallel=replace(config.parallel, distributed_backend=backend))
    with pytest.raises(Stop):
        pretrain.train(Ranks(), config, [])
    assert calls == (["kept"] if backend == "gloo" else [])
