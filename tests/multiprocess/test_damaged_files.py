"""Damaged files and full disks: every rank names them in a line, and older checkpoints stay."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.find import read_tracker
from tests.multiprocess.test_faults import SCRIPT
from tests.support.cli import CliResult, launch_ranks_cli, run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.train import train

pytestmark = pytest.mark.multiprocess


def _flip(folder: Path) -> None:
    shard = max(folder.glob("shard_*.bin"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 16
    shard.write_bytes(data)


@pytest.fixture(scope="module")
def two_checkpoints(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = tmp_path_factory.mktemp("saved") / "run"
    train(1, tiny_flags(prefix, train_iters=4, save=saved, save_interval=2))
    return saved


def _one_error_line(results: list[CliResult]) -> str:
    """The only line that rank 0 printed; every rank must have ended with the status of bad input."""
    assert [result.returncode for result in results] == [2] * len(results), results[0].text()
    assert "Traceback" not in "".join(result.stderr for result in results)
    lines = [line for line in results[0].stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, results[0].stderr
    return lines[0]


@pytest.mark.parametrize("damage", [_flip, shutil.rmtree])
def test_damaged_checkpoints_are_named_and_older_ones_offered(
    prefix: Path, two_checkpoints: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(two_checkpoints, saved)
    damage(saved / "iter_0000004")
    flags = tiny_flags(prefix, load=saved, tensor_model_parallel_size=2)
    with launch_ranks_cli(2, [SCRIPT, *flags]) as ranks:
        line = _one_error_line(ranks.wait(60))
    assert str(saved) in line
    assert re.search(r"\b2\b", line), f"the older checkpoint is not offered: {line}"
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    train(1, tiny_flags(prefix, load=saved, train_iters=3))


def test_a_full_disk_is_one_error_and_keeps_older_checkpoints(prefix: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=3m tmpfs {small} 2>/dev/null") != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        saved = small / "run"
        sizes = {"hidden_size": 64, "num_layers": 4, "ffn_hidden_size": 64}
        flags = tiny_flags(prefix, **sizes, save=saved, save_interval=1, tensor_model_parallel_size=2)
        with launch_ranks_cli(2, [SCRIPT, *flags]) as ranks:
            line = _one_error_line(ranks.wait(60))
        assert "No space left" in line
        latest = read_tracker(saved)
        assert isinstance(latest, int)
        resumed = tiny_flags(prefix, **sizes, load=saved, train_iters=latest + 1)
        train(1, resumed)
    finally:
        os.system(f"umount {small}")


@pytest.mark.parametrize("damage", ["truncated", "magic", "token"])
def test_damaged_data_is_found_at_the_start(prefix: Path, tmp_path: Path, damage: str) -> None:
    bad = write_documents(tmp_path / "bad", vocab_size=60 if damage != "token" else 90)
    if damage == "truncated":
        os.truncate(f"{bad}.bin", os.path.getsize(f"{bad}.bin") - 10)
    if damage == "magic":
        Path(f"{bad}.idx").write_bytes(b"nonsense!" + Path(f"{bad}.idx").read_bytes()[9:])
    with launch_ranks_cli(2, [SCRIPT, *tiny_flags(bad)]) as ranks:
        line = _one_error_line(ranks.wait(60))
    assert str(bad) in line


def test_a_folder_that_cannot_be_written_is_found_before_training(prefix: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    log = tmp_path / "log.jsonl"
    result = run_cli(2, [SCRIPT, *tiny_flags(prefix, save=blocked, log_json_file=log)])
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: --save {blocked}: cannot write there"), result.text()
    assert "Traceback" not in result.text()
    assert not log.exists() or '"train"' not in log.read_text()
