"""A full disk, or a kill at any moment, leaves the earlier checkpoint loadable."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from megatron.base.errors import UserError
from megatron.checkpoint import files, storage
from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.find import read_tracker
from megatron.checkpoint.load import load_common, load_tensors
from megatron.checkpoint.logical import LogicalShard, shard_of_local
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.saver import CheckpointSaver

pytestmark = pytest.mark.slow

SIZE = 4096


def shards(x: torch.Tensor) -> dict[str, LogicalShard]:
    return {"x": shard_of_local(x, (0,), x.shape)}


def save(root: Path, iteration: int, generation: int, size: int = SIZE) -> None:
    """Saves a tensor filled with ``generation``, which the common values also hold."""
    save_checkpoint(root, iteration, shards(torch.full((size,), float(generation))), {"g": generation}, "")


def load(root: Path, size: int = SIZE) -> tuple[int, int]:
    """The tracker's iteration, and its generation."""
    iteration = read_tracker(root)
    assert isinstance(iteration, int)
    x = torch.zeros(size)
    load_tensors(root, iteration, shards(x))
    generation = load_common(root, iteration)["g"]
    assert x.eq(generation).all()
    return iteration, generation


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(stream: io.FileIO, data: memoryview) -> None:
    stream.write(data[:1000])
    no_space()


@pytest.mark.parametrize(
    ("module", "function", "failure"),
    [
        (storage, "write_all", half_written),
        (os, "fsync", no_space),
        (storage, "write_synced", no_space),
        (files, "write_synced", no_space),
    ],
    ids=["shard", "fsync", "document", "tracker"],
)
@pytest.mark.parametrize("iteration", [1, 2])
def test_a_full_disk_changes_nothing(
    tmp_path: Path, module: ModuleType, function: str, failure: Callable[..., None], iteration: int
) -> None:
    save(tmp_path, 1, 1)
    before = snapshot(tmp_path)
    message = r"iteration \d was not saved.*No space left on device: free some"
    with mock.patch.object(module, function, failure), pytest.raises(UserError, match=message) as error:
        save(tmp_path, iteration, 2)
    assert "\n" not in str(error.value)
    assert snapshot(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", TRACKER]
    save(tmp_path, iteration, 2)
    assert load(tmp_path) == (iteration, 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if mount is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("async_", [False, True])
def test_a_save_to_a_full_file_system(small_disk: Path, async_: bool) -> None:
    size = 100_000
    saver = CheckpointSaver(small_disk, async_=async_)
    for iteration in (1, 2):
        saver.save(iteration, shards(torch.full((size,), float(iteration))), {"g": iteration}, "")
    saver.finish_save()
    before = snapshot(small_disk)

    def third() -> None:
        saver.save(3, shards(torch.full((size,), 3.0)), {"g": 3}, "")
        saver.finish_save()

    with pytest.raises(UserError, match=r"shard_00000.bin: No space left on device"):
        third()
    assert snapshot(small_disk) == before
    assert load(small_disk, size) == (2, 2)


def _die_at(number: int, root: str) -> None:
    """Kills this process before its ``number``-th use of a path below ``root``."""
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
            path = arguments[0]
            # Removing a tree uses names relative to an open folder.
            inside = isinstance(path, str | os.PathLike) and str(path).startswith(root)
            if inside or event in ("os.remove", "os.rmdir"):
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

    sys.addaudithook(hook)


@pytest.mark.parametrize("iteration", [1, 2])
def test_a_kill_before_any_file_operation(tmp_path: Path, iteration: int) -> None:
    """Iteration 1 replaces the tracker's checkpoint; 2 is new."""
    template = tmp_path / "template"
    save(template, 1, 1)
    kills = 0
    while True:
        root = tmp_path / f"root{kills}"
        shutil.copytree(template, root)
        pid = os.fork()
        if pid == 0:
            _die_at(kills, str(root))
            save(root, iteration, 2)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        loaded = load(root)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert loaded in [(1, 1), (iteration, 2)]
        save(root, 3, 3)  # despite leftover files
        assert load(root) == (3, 3)
        assert not [p.name for p in root.iterdir() if p.name.startswith(".")]
        kills += 1
    assert loaded == (iteration, 2)
    assert kills >= 10


def _save_for_ever(root: str) -> None:
    torch.set_num_threads(1)
    generation = 0
    while True:
        generation += 1
        save(Path(root), 1 + generation % 3, generation, size=1 << 20)


def test_kills_at_random_moments(tmp_path: Path) -> None:
    generator = random.Random(0)
    context = multiprocessing.get_context("fork")
    for _ in range(4):
        process = context.Process(target=_save_for_ever, args=(str(tmp_path),))
        process.start()
        deadline = time.monotonic() + 60
        while not (tmp_path / TRACKER).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.2))
        process.kill()
        process.join()
        iteration, generation = load(tmp_path, 1 << 20)
        assert iteration == 1 + generation % 3
