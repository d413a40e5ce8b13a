"""Freed memory that the process keeps: no page faults where a step touches it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from megatron.base.errors import UserError
from megatron.base.memory import keep_freed_memory
from megatron.training import pretrain

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")

FLAGS = [
    "--max-position-embeddings",
    "8",
    "--micro-batch-size",
    "1",
    "--train-iters",
    "1",
    "--lr",
    "1e-3",
    "--data-path",
    "no",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "8",
]
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
"""Of the blocks of a step, which touches them page by page, at 4 KiB or more."""


def _printed(keeps: bool) -> list[str]:
    given = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "GLIBC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(keeps=keeps)], env=given, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_what_a_step_has_freed_is_there_for_the_next_one() -> None:
    assert _printed(keeps=False)[:2] == ["False", "1"]
    *found, faults = _printed(keeps=True)
    assert found == ["True", "0", "True"]
    assert int(faults) < BYTES / 4096 / 50


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
        *((f"MALLOC_{name}_", "131072") for name in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX")),
    ],
)
def test_settings_of_the_environment_remain(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


def test_training_on_cpus_keeps_what_is_freed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked() -> None:
        raise UserError("asked")

    monkeypatch.setattr(pretrain, "keep_freed_memory", asked)
    assert (
        pretrain.main(
            [*["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8"], *FLAGS]
        )
        == 2
    )
    assert capsys.readouterr().err.strip() == "error: asked"
