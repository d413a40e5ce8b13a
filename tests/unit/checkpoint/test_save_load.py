"""Saving and loading in a single process: contents, tracker, replacement, pruning, other models."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.find import complete_iterations, read_tracker
from megatron.checkpoint.load import load_common, load_config_yaml, load_tensors, open_checkpoint, saved_config
from megatron.checkpoint.logical import LogicalShard, shard_of_local
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.saver import CheckpointSaver

COMMON = {"iteration": 3, "lr": 0.1, "betas": (0.9, 0.95)}


def model(value: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(int(value))
    return {
        "embedding.weight": torch.randn(7, 4) + value,
        "layers.0.bias": torch.randn(4).to(torch.bfloat16),
        "optimizer.step": torch.tensor(value, dtype=torch.float64),
    }


def shards(tensors: dict[str, Tensor]) -> dict[str, LogicalShard]:
    return {name: shard_of_local(x, (0,) * x.dim(), x.shape) for name, x in tensors.items()}


def save(root: Path, iteration: int, value: float | None = None, **options: Any) -> None:
    value = float(iteration) if value is None else value
    save_checkpoint(root, iteration, shards(model(value)), COMMON, "seed: 1\n", **options)


def assert_holds(root: Path, iteration: int | Literal["release"], value: float | None = None) -> None:
    loaded = model(-1.0)
    load_tensors(root, iteration, shards(loaded))
    expected = model(float(iteration if value is None else value))
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_round_trip_is_exact(tmp_path: Path) -> None:
    lines: list[str] = []
    save(tmp_path, 3, log=lines.append)
    assert_holds(tmp_path, 3)
    assert read_tracker(tmp_path) == 3
    assert load_common(tmp_path, 3) == COMMON
    assert load_config_yaml(tmp_path, 3) == "seed: 1\n"
    assert open_checkpoint(tmp_path, 3)[1].world_size == 1
    assert any("successfully saved checkpoint at iteration       3" in line for line in lines)


def test_layout_of_the_folder(tmp_path: Path) -> None:
    save(tmp_path, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000100", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "100\n"
    files = {p.name: p for p in (tmp_path / "iter_0000100").iterdir()}
    assert sorted(files) == ["common.json", "config.yaml", "metadata.json", "shard_00000.bin"]
    assert json.loads(files["common.json"].read_text())["iteration"] == 3
    json.loads(files["metadata.json"].read_text())
    assert files["shard_00000.bin"].stat().st_size == 7 * 4 * 4 + 4 * 2 + 8


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_of_an_earlier_version_is_loaded(damaged: bool, tmp_path: Path) -> None:
    """Pickled headers in its shard, and its file ``.metadata``, are not read."""
    shutil.copytree(Path(__file__).parents[2] / "golden" / "checkpoint", tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "iter_0000003"
    if damaged:
        (folder / ".metadata").write_bytes(bytes((folder / ".metadata").stat().st_size))
        tensors = json.loads((folder / "metadata.json").read_text())["content"]["tensors"]
        spans = [chunk[3:5] for tensor in tensors.values() for chunk in tensor["chunks"]]
        stored = {position for offset, length in spans for position in range(offset, offset + length)}
        data = (folder / "shard_00000.bin").read_bytes()
        changed = bytes(byte if position in stored else byte ^ 1 for position, byte in enumerate(data))
        assert changed != data
        (folder / "shard_00000.bin").write_bytes(changed)
    types = (torch.float64, torch.float32, torch.bfloat16, torch.int8)
    expected = {f"optimizer.{str(dtype)[6:]}": (torch.arange(12) - 5).to(dtype).view(3, 4) for dtype in types}
    expected["model.parts"] = torch.arange(20.0).view(5, 4)
    loaded = {name: torch.zeros_like(x) for name, x in expected.items()}
    load_tensors(tmp_path, 3, shards(loaded))
    assert all(torch.equal(loaded[name], x) for name, x in expected.items())
    assert load_common(tmp_path, 3)["a"] == 1


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, mock.Mock(side_effect=AssertionError("a pickle was read")))
    assert_holds(tmp_path, 1)
    assert load_common(tmp_path, 1) == COMMON


def test_replacing_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, 5.0)
    save(tmp_path, 2)
    save(tmp_path, 1, 6.0)
    assert read_tracker(tmp_path) == 1
    assert_holds(tmp_path, 1, 6.0)
    assert_holds(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", "iter_0000002", TRACKER]


def test_leftovers_are_removed_and_a_displaced_checkpoint_returns(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / ".tmp_iter_0000002").mkdir()
    (tmp_path / ".tmp_iter_0000002" / "shard_00000.bin").write_bytes(b"half")
    (tmp_path / "iter_0000002").rename(tmp_path / ".old_iter_0000002")
    assert read_tracker(tmp_path) == 2  # killed between the two renames of a replacement
    assert_holds(tmp_path, 2)
    save(tmp_path, 3)
    assert_holds(tmp_path, 2)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["iter_0000001", "iter_0000002", "iter_0000003", TRACKER]


def test_keep_last_keeps_the_newest_of_this_run(tmp_path: Path) -> None:
    save(tmp_path, 90)  # of an earlier, longer run
    for iteration in (1, 2, 3, 4):
        save(tmp_path, iteration, keep_last=2)
    assert complete_iterations(tmp_path) == [90, 4, 3]
    assert read_tracker(tmp_path) == 4


def test_the_newest_checkpoint_before_an_update_is_kept(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8):  # the last update was in iteration 5
        save(tmp_path, iteration, keep_last=1, last_update=min(iteration, 5))
        assert complete_iterations(tmp_path) == {2: [2], 4: [4, 2], 6: [6, 4], 8: [8, 4]}[iteration]
    save(tmp_path, 10, keep_last=2, last_update=10)
    assert complete_iterations(tmp_path) == [10, 8]


def test_old_checkpoints_that_are_links_are_unlinked(tmp_path: Path) -> None:
    """The target of a link, such as a checkpoint moved to another disk, stays."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    save(root, 1)
    (root / "iter_0000001").rename(elsewhere)
    (root / "iter_0000001").symlink_to(elsewhere)
    (root / ".tmp_iter_0000009").symlink_to(elsewhere)
    (root / ".tmp_removed_iter_0000008").symlink_to(tmp_path / "nothing")
    for iteration in (2, 3, 4):
        lines: list[str] = []
        save(root, iteration, keep_last=2, log=lines.append)
        assert not [line for line in lines if "could not" in line]
    assert sorted(p.name for p in root.iterdir()) == ["iter_0000003", "iter_0000004", TRACKER]
    assert (elsewhere / "metadata.json").is_file()
    (root / "iter_0000004").rename(tmp_path / "four")
    (root / "iter_0000004").symlink_to(tmp_path / "four")
    save(root, 4, 7.0)  # replaced
    assert_holds(root, 4, 7.0)
    assert not (root / "iter_0000004").is_symlink()


def test_a_folder_that_cannot_be_removed_does_not_fail_a_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / ".tmp_removed_iter_0000000").mkdir()
    with mock.patch.object(shutil, "rmtree", side_effect=OSError(16, "Device or resource busy", "a folder")):
        for iteration in (3, 4):
            lines: list[str] = []
            save(tmp_path, iteration, keep_last=1, log=lines.append)
            assert read_tracker(tmp_path) == iteration
            assert_holds(tmp_path, iteration)
            (problem,) = [line for line in lines if "could not remove an old checkpoint" in line][-1:]
            assert "Device or resource busy" in problem
        (tmp_path / "iter_0000004").rename(tmp_path / ".tmp_iter_0000005")  # an incomplete save, left by a kill
        with pytest.raises(UserError, match="not saved"):
            save(tmp_path, 5)
        (tmp_path / ".tmp_iter_0000005").rename(tmp_path / "iter_0000004")
    save(tmp_path, 5, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", TRACKER]


def test_an_empty_folder_has_no_tracker(tmp_path: Path) -> None:
    assert read_tracker(tmp_path) is None
    assert read_tracker(tmp_path / "absent") is None
    tmp_path.joinpath(".tmp_iter_0000001").mkdir()  # the first save was interrupted
    assert read_tracker(tmp_path) is None


@pytest.mark.parametrize("dangling_link", [False, True])
def test_the_newest_complete_checkpoint_replaces_a_missing_tracker(tmp_path: Path, dangling_link: bool) -> None:
    """A kill is possible between the renames of the first checkpoint and of its tracker."""
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    (tmp_path / TRACKER).unlink()
    if dangling_link:
        (tmp_path / TRACKER).symlink_to(tmp_path / "nothing")
    (tmp_path / "iter_0000003" / "metadata.json").unlink()
    lines: list[str] = []
    assert read_tracker(tmp_path, lines.append) == 2
    assert [line.partition("; ")[2] for line in lines] == ["taking iteration 2, the newest complete checkpoint there"]
    for iteration in (1, 2):
        (tmp_path / f"iter_000000{iteration}" / "shard_00000.bin").unlink()
    with pytest.raises(UserError, match=r"is missing and no checkpoint there is complete \(iter_0000003, iter_0000002"):
        read_tracker(tmp_path)
    save(tmp_path / "other", 4)
    (tmp_path / "other" / "iter_0000004").rename(tmp_path / "other" / "release")
    (tmp_path / "other" / TRACKER).unlink()
    assert read_tracker(tmp_path / "other") == "release"


@pytest.mark.parametrize("text", ["", "\n", "12a", "-3", "1e3", "rel", "\0\xff", "9" * 90, "٣"])
def test_an_invalid_tracker_is_refused(tmp_path: Path, text: str) -> None:
    save(tmp_path, 4)
    (tmp_path / TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"latest_checkpointed_iteration.txt holds .*iteration 4 is complete") as error:
        read_tracker(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tracker_with_a_missing_iteration(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(UserError, match=r"names iteration 7, which is not there; .* no other complete checkpoint"):
        read_tracker(tmp_path)
    save(tmp_path, 4)
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(UserError, match=r"names iteration 7.*; iteration 4 is complete: .* write 4 into"):
        read_tracker(tmp_path)


def test_release(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "iter_0000004").rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    assert read_tracker(tmp_path) == "release"
    assert_holds(tmp_path, "release", 4.0)


def another_model() -> dict[str, Tensor]:
    tensors = model(-1.0)
    tensors["embedding.weight"] = torch.zeros(8, 4)
    tensors["layers.1.bias"] = tensors.pop("layers.0.bias")
    return tensors


def test_another_model_is_refused_without_changes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tensors = another_model()
    before = {name: x.clone() for name, x in tensors.items()}
    with pytest.raises(UserError) as error:
        load_tensors(tmp_path, 1, shards(tensors))
    message = str(error.value)
    assert "checkpoint of another model" in message
    assert "embedding.weight has shape (7, 4) instead of (8, 4)" in message
    assert "layers.1.bias is not in it" in message
    assert "layers.0.bias is in it, but not in this model" in message
    assert "--num-layers" in message
    assert "--hidden-size" in message
    assert "\n" not in message
    for name, x in tensors.items():
        assert torch.equal(x, before[name])

    with pytest.raises(UserError, match="and 19 more"):
        load_tensors(tmp_path, 1, shards({f"x{i}": torch.zeros(2) for i in range(20)}))


def test_the_message_for_another_optimizer(tmp_path: Path) -> None:
    weight = {"model.layers.0.weight": torch.ones(2, 2)}
    first, second = ({f"optimizer.{kind}.layers.0.weight": torch.ones(2, 2)} for kind in ("exp_avg", "momentum_buffer"))
    save_checkpoint(tmp_path, 1, shards(weight | second), COMMON, "seed: 1\n")
    message = r"^[^\n]*has the state of another optimizer: optimizer.exp_avg.layers.0.weight is not in it[^\n]*"
    with pytest.raises(UserError, match=rf"{message}or --no-load-optim to begin with new moments$"):
        load_tensors(tmp_path, 1, shards(weight | first))


def test_unexpected_tensors_must_be_allowed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tensors = model(-1.0)
    del tensors["optimizer.step"]
    with pytest.raises(UserError, match=r"optimizer.step is in it"):
        load_tensors(tmp_path, 1, shards(tensors))
    load_tensors(tmp_path, 1, shards(tensors), allow_unexpected=lambda name: name.startswith("optimizer."))
    assert torch.equal(tensors["embedding.weight"], model(1.0)["embedding.weight"])
    del tensors["layers.0.bias"]
    with pytest.raises(UserError, match=r"layers.0.bias is in it"):
        load_tensors(tmp_path, 1, shards(tensors), allow_unexpected=lambda name: name.startswith("optimizer."))
    load_tensors(tmp_path, 1, shards(tensors), allow_unexpected=lambda name: True)


def test_types_are_converted_and_logged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tensors = {name: x.float() for name, x in model(-1.0).items()}
    lines: list[str] = []
    load_tensors(tmp_path, 1, shards(tensors), log=lines.append)
    assert torch.equal(tensors["layers.0.bias"], model(1.0)["layers.0.bias"].float())
    assert "converting 1 tensors of the checkpoint from torch.bfloat16 to torch.float32" in lines
    tensors["layers.0.bias"] = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UserError, match=r"layers.0.bias is torch.bfloat16 instead of torch.int64"):
        load_tensors(tmp_path, 1, shards(tensors))


def test_loads_into_parameters_and_strided_memory(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4)
    save_checkpoint(tmp_path, 1, shards({"x": x}), {}, "")
    target = torch.nn.Parameter(torch.zeros(4, 3))
    load_tensors(tmp_path, 1, {"x": shard_of_local(target.t(), (0, 0), (3, 4))})
    assert torch.equal(target.detach(), x.t())


def test_a_tensor_without_elements(tmp_path: Path) -> None:
    tensors = {"x": torch.zeros(0, 4), "y": torch.ones(2)}
    save_checkpoint(tmp_path, 1, shards(tensors), {}, "")
    load_tensors(tmp_path, 1, shards(tensors))


def test_incomplete_tensors_and_odd_values_are_refused(tmp_path: Path) -> None:
    half = {"x": shard_of_local(torch.zeros(2), (0,), (4,))}
    with pytest.raises(UserError, match=r"not saved.*cannot save x: the ranks hold 2 of its 4"):
        save_checkpoint(tmp_path, 1, half, {}, "")
    for async_ in (False, True):
        saver = CheckpointSaver(tmp_path, async_=async_)
        with pytest.raises(UserError, match=r"state\['f'\] is a lock"):  # noqa: PT012  # in the call or later
            saver.save(1, {}, {"f": threading.Lock()}, "")
            saver.finish_save()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("async_", [False, True])
def test_saver(tmp_path: Path, async_: bool) -> None:
    saver = CheckpointSaver(tmp_path, async_=async_, keep_last=2)
    for iteration in (1, 2, 3):
        tensors = model(float(iteration))
        saver.save(iteration, shards(tensors), COMMON, "")
        for x in tensors.values():
            x.zero_()  # training continues
        saver.poll()
    saver.finish_save()
    assert complete_iterations(tmp_path) == [3, 2]
    assert_holds(tmp_path, 2)
    assert_holds(tmp_path, 3)


def test_training_may_change_what_is_saved_in_the_background(tmp_path: Path) -> None:
    has_changed = threading.Event()

    def save_later(*args: Any, **options: Any) -> None:
        assert has_changed.wait(60)
        save_checkpoint(*args, **options)

    tensors, common = model(1.0), {"progress": {"iteration": 1}}
    saver = CheckpointSaver(tmp_path, async_=True)
    with mock.patch("megatron.checkpoint.saver.save_checkpoint", save_later):
        saver.save(1, shards(tensors), common, "")
    for x in tensors.values():
        x.zero_()
    common["progress"]["iteration"] = 2
    has_changed.set()
    saver.finish_save()
    assert_holds(tmp_path, 1)
    assert load_common(tmp_path, 1) == {"progress": {"iteration": 1}}


def test_async_and_synchronous_files_are_equal(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    saver = CheckpointSaver(tmp_path / "b", async_=True)
    saver.save(1, shards(model(1.0)), COMMON, "seed: 1\n")
    saver.finish_save()
    for path in (tmp_path / "a" / "iter_0000001").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / "iter_0000001" / path.name).read_bytes()


def test_an_async_failure_surfaces_at_a_later_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = CheckpointSaver(tmp_path / "file", async_=True)
    saver.save(1, shards(model(1.0)), COMMON, "")

    def train() -> None:
        for _ in range(10_000):
            torch.randn(10_000).sum()
            saver.poll()

    with pytest.raises(UserError, match="not saved"):
        train()
    saver.poll()


def test_the_message_for_a_requested_iteration_leaves_the_tracker_alone(tmp_path: Path) -> None:
    """An older iteration in the tracker would set the run back."""
    for iteration in (3, 6):
        save(tmp_path, iteration)
    for broken, complete in ((5, "6, 3"), (3, "6")):
        if broken == 3:
            (tmp_path / "iter_0000003" / "metadata.json").write_text("{")
        with pytest.raises(UserError) as error:
            saved_config(tmp_path, broken)
        assert str(error.value).endswith(f"newest first: {complete}; name one of them (--ckpt-step 6)")
        with pytest.raises(UserError, match=r"newest first: 6.*; name one of them$"):
            load_tensors(tmp_path, broken, shards(model()))
    config = tmp_path / "iter_0000006" / "config.yaml"
    config.write_bytes(config.read_bytes()[:-1])
    save(tmp_path, 4)
    (tmp_path / TRACKER).write_text("6")
    with pytest.raises(UserError, match=r"config.yaml is missing.*: 4; name one of them \(--ckpt-step 4\)$"):
        saved_config(tmp_path, 6)
    with pytest.raises(UserError, match=r"--ckpt-step -3: iterations count from 0"):
        saved_config(tmp_path, -3)
