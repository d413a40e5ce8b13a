"""Freed memory that the process keeps: no page faults where a step touches it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")

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
from_system = info().hblks
block = torch.empty(31 << 18)  # 31 MiB
from_system = info().hblks - from_system
del block
block, heap = take(30 << 20), info().arena
give(block)
kept = info().arena == heap
for _ in range(6):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(6 << 20) for _ in range(6)]  # 24 MiB each
    del blocks
print(keeps, from_system, kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""
BYTES = 6 * 24 << 20
"""Of the blocks of a step, which touches them page by page, at 4 KiB or more."""


def _printed(keeps: bool, **env: str) -> list[str]:
    given = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "GLIBC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(keeps=keeps)], env=given | env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_what_a_step_has_freed_is_there_for_the_next_one() -> None:
    assert _printed(keeps=False)[:2] == ["False", "1"]
    *found, faults = _printed(keeps=True)
    assert found == ["True", "0", "True"]
    assert int(faults) < BYTES / 4096 / 50


def test_settings_of_the_environment_remain() -> None:
    assert _printed(keeps=True, MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
