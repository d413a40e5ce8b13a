"""A run replaces another run's checkpoints with --overwrite-checkpoints only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.find import complete_iterations, read_tracker
from megatron.checkpoint.folder_lock import LOCK, FolderLock
from megatron.training.pretrain import main
from tests.support.corpus import tiny_flags, write_documents


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def finished_run(prefix: Path) -> Path:
    folder = prefix.parent / "saved"
    assert main(tiny_flags(prefix, train_iters=2, save=folder, save_interval=1)) == 0
    return folder


@pytest.fixture
def saved(finished_run: Path, tmp_path: Path) -> Path:
    """Checkpoints of iterations 1 and 2 of a run of 2."""
    return Path(shutil.copytree(finished_run, tmp_path / "saved"))


def _snapshot(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != LOCK}


def _refused(capsys: pytest.CaptureFixture[str], root: Path, flags: list[str]) -> str:
    """The message to a refused run, which changes nothing."""
    before = _snapshot(root)
    capsys.readouterr()
    assert main(flags) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert _snapshot(root) == before
    return message


def test_another_runs_checkpoints_are_not_replaced(
    prefix: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes in ({}, {"num_layers": 4}, {"load": tmp_path / "elsewhere"}):
        message = _refused(capsys, saved, tiny_flags(prefix, train_iters=1, save=saved, **changes))
        assert f"--save {saved} holds checkpoints of another run (iteration 2)" in message
        assert f"--load {saved} goes on from them" in message
        assert "--overwrite-checkpoints replaces them" in message
    message = _refused(capsys, saved, tiny_flags(prefix, train_iters=1, save=saved, load=saved, finetune=True))
    assert "leave --finetune out to go on from them" in message


def test_damaged_checkpoints_and_a_tracker_alone_are_not_replaced(
    prefix: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (1, 2):
        (saved / f"iter_000000{iteration}" / "metadata.json").unlink()
    assert "(iteration 2)" in _refused(capsys, saved, tiny_flags(prefix, save=saved))
    (saved / TRACKER).unlink()
    message = _refused(capsys, saved, tiny_flags(prefix, save=saved, load=saved))
    assert "latest_checkpointed_iteration.txt is missing and no checkpoint there is complete" in message
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / TRACKER).write_text("release")
    assert TRACKER in _refused(capsys, bare, tiny_flags(prefix, save=bare))


def test_checkpoints_are_replaced_on_request(prefix: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = tiny_flags(prefix, train_iters=1, save=saved, overwrite_checkpoints=True)
    assert main([*flags, "--seed", "77"]) == 0
    assert read_tracker(saved) == 1
    assert complete_iterations(saved) == [2, 1]
    assert (
        main(tiny_flags(prefix, train_iters=1, save=saved, finetune=True, load=saved, overwrite_checkpoints=True)) == 0
    )
    capsys.readouterr()
    assert main(tiny_flags(prefix, train_iters=2, save=saved, load=f"{saved}/.", overwrite_checkpoints=True)) == 0
    message = capsys.readouterr().out
    assert "--overwrite-checkpoints: no effect, --load goes on from the checkpoints of --save" in message


def test_resuming_in_place_and_into_another_folder_is_allowed(
    prefix: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(saved)
    assert main(tiny_flags(prefix, train_iters=3, save=saved, load=link)) == 0
    assert read_tracker(saved) == 3
    assert main(tiny_flags(prefix, train_iters=4, save=tmp_path / "fresh", load=saved)) == 0
    assert read_tracker(tmp_path / "fresh") == 4
    assert main([*tiny_flags(prefix, save=saved), "--skip-train"]) == 0  # saves nothing
    assert "loaded the checkpoint of iteration 3" in capsys.readouterr().out


@pytest.mark.parametrize("dangling_link", [False, True])
def test_without_a_tracker_the_newest_complete_checkpoint_is_loaded(
    prefix: Path, saved: Path, capsys: pytest.CaptureFixture[str], dangling_link: bool
) -> None:
    (saved / TRACKER).unlink()
    if dangling_link:
        (saved / TRACKER).symlink_to(saved / "gone")
    (saved / "iter_0000002" / "common.json").unlink()
    capsys.readouterr()
    assert main(tiny_flags(prefix, train_iters=2, save=saved, load=saved)) == 0
    out = capsys.readouterr().out
    assert f"{saved / TRACKER} is missing; taking iteration 1, the newest complete checkpoint there" in out
    assert "loaded the checkpoint of iteration 1" in out
    assert not (saved / TRACKER).is_symlink()
    assert read_tracker(saved) == 2


def test_a_refused_run_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = tiny_flags(tmp_path / "no-data", save=tmp_path / "saved")
    assert "no-data" in _refused(capsys, tmp_path, flags)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "saved").mkdir()
    _refused(capsys, tmp_path, flags)
    assert (tmp_path / "saved").is_dir()


def test_a_folder_in_use_is_refused(
    prefix: Path, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.checkpoint.folder_lock.PATIENCE_SECONDS", 0.2)
    lock = FolderLock(saved)
    for flags in (tiny_flags(prefix, save=saved), tiny_flags(prefix, save=saved, load=saved)):
        message = _refused(capsys, saved, flags)
        assert f"--save {saved} is in use by another run (process {os.getpid()} on " in message
    assert main(tiny_flags(prefix, load=saved, train_iters=3)) == 0  # readers are allowed
    lock.release()


def test_a_run_saves_nothing_after_losing_its_folder(
    prefix: Path, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderLock, "explain_loss", lambda self: "--save was taken over by another run")
    before = complete_iterations(saved)
    assert main(tiny_flags(prefix, train_iters=4, save=saved, load=saved)) == 2
    assert "error: --save was taken over" in capsys.readouterr().err
    assert complete_iterations(saved) == before


@pytest.mark.parametrize("name", ["save", "load", "data-path", "vocab-file", "tensorboard-dir", "log-json-file"])
def test_an_unset_shell_variable_is_an_error(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for text in ("", " "):
        message = _refused(capsys, tmp_path, [*tiny_flags(prefix), f"--{name}", text])
        assert f"--{name}: the value is empty; is a shell variable not set?" in message
