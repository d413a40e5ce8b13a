"""``--load`` of something other than a folder of checkpoints: one line says what it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.find import read_tracker
from megatron.checkpoint.load import saved_config
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.distributed.topology import single_process
from megatron.training.saved_run import SavedRun, find_saved, with_pretrained
from tests.support.device import own_device
from tests.unit.checkpoint.test_save_load import save


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def _hugging_face(root: Path) -> Path:
    _file(root / "config.json")
    return _file(root / "model-00001-of-00002.safetensors").parent


def _single(root: Path) -> Path:
    save(root, 100)
    return root / "iter_0000100"


def _renamed(root: Path) -> Path:
    return _single(root).rename(root / "best")


def _classic(root: Path) -> Path:
    _file(root / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt")
    return root


def _tracked(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def make_tracked(root: Path) -> Path:
        make(root)
        (root / TRACKER).write_text("100")
        return root

    return make_tracked


def _torch_dist(root: Path) -> Path:
    _file(root / "iter_0000100" / "metadata.json")
    _file(root / "iter_0000100" / "common.pt")
    return _file(root / "iter_0000100" / ".metadata").parents[1]


CONVERT = "tools/ckpt_convert.py --to megatron-cc"
CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "file": (
        lambda root: _file(root / "model.pt"),
        f"/model.pt is a file; name the folder that --save wrote to ({CONVERT}",
    ),
    "classic file": (
        lambda root: _file(root / "mp_rank_00" / "model_optim_rng.pt"),
        "model_optim_rng.pt is a file; name",
    ),
    "hugging face": (_hugging_face, f"/root is a Hugging Face model; convert it ({CONVERT} --load "),
    "single": (_single, "/root/iter_0000100 is a single checkpoint; name the folder that holds it, "),
    "renamed": (_renamed, "/root/best is a single checkpoint; name the folder that holds it"),
    "classic": (_classic, f"/iter_0000100 is a classic Megatron checkpoint; convert it ({CONVERT} --load "),
    "tracked classic": (_tracked(_classic), "/iter_0000100 is a classic Megatron checkpoint; convert it"),
    "classic iteration": (
        lambda root: _classic(root) / "iter_0000100",
        "/iter_0000100 is a classic Megatron checkpoint",
    ),
    "torch_dist": (
        _tracked(_torch_dist),
        "/iter_0000100 is a torch_dist checkpoint of Megatron-LM, which cannot be read",
    ),
}


def _find(root: Path, finetune: bool = False) -> SavedRun | None:
    config = CheckpointConfig(load=str(root), finetune=finetune)
    return find_saved(config, single_process(own_device(0)), print)


@pytest.mark.parametrize(("make", "message"), CASES.values(), ids=CASES)
def test_something_else_is_named_in_one_line(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    """Nor does a run start afresh from it."""
    path = make(tmp_path / "root")
    pretrained = replace(RunConfig(), checkpoint=CheckpointConfig(pretrained_checkpoint=str(path)))
    for load in (
        lambda: _find(path),
        lambda: _find(path, finetune=True),
        lambda: saved_config(path),
        lambda: with_pretrained(pretrained, print),
    ):
        with pytest.raises(UserError) as error:
            load()
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_a_single_checkpoint_is_selected_by_its_iteration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"holds it, {tmp_path} \(--ckpt-step 100 selects it\)"):
        _find(_single(tmp_path))
    assert _single(tmp_path / "again").name == f"iter_{read_tracker(tmp_path):07d}"


def test_a_new_folder_starts_afresh(tmp_path: Path) -> None:
    """Also among files of the run, and of the user."""
    for name in ("log.jsonl", "config.json", "metadata.json", "tensorboard/events", "model.txt"):
        _file(tmp_path / name)
    assert _find(tmp_path) is None
    assert _find(tmp_path / "none") is None
    for path, absence in (
        (tmp_path, "holds no checkpoint; name"),
        (tmp_path / "none", "(there is no such folder); name"),
    ):
        for load in (lambda path=path: _find(path, finetune=True), lambda path=path: saved_config(path)):
            with pytest.raises(UserError) as error:
                load()
            assert str(error.value).startswith(f"--load {path} holds no checkpoint")
            assert absence in str(error.value)
