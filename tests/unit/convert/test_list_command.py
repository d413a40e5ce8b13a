"""`ckpt.py ls` on intact and damaged checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.checkpoint.find import read_tracker
from megatron.checkpoint.logical import shard_of_local
from megatron.checkpoint.save import save_checkpoint
from megatron.convert.list_command import main

CONFIG = """
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 8, seq_length: 32}
parallel: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
"""
SHAPES = {
    "model.layers.0.weight": ((3, 4), torch.bfloat16),
    "model.layers.0.bias": ((3,), torch.bfloat16),
    "optimizer.exp_avg.layers.0.weight": ((3, 4), torch.float32),
    "compressor.dp-grad.residual": ((5,), torch.float32),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for iteration in (100, 200, 300):
        tensors = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
        shards = {name: shard_of_local(x, (0,) * x.dim(), x.shape) for name, x in tensors.items()}
        common = {"progress": {"iteration": iteration, "consumed_samples": 8 * iteration, "skipped": 2}}
        save_checkpoint(tmp_path, iteration, shards, common, CONFIG)
    return tmp_path


def _listed(root: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["ls", str(root), "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def _damage(root: Path, iteration: int, shift: int = 0) -> None:
    """Change a byte of a tensor, or the length of its file."""
    path = root / f"iter_{iteration:07d}" / "shard_00000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data[: len(data) - shift]))


def test_experts_are_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = {"model.x": shard_of_local(torch.ones(3), (0,), (3,))}
    config = CONFIG.replace("num_layers: 4", "num_layers: 4, num_experts: [4, 2], moe_router_topk: 2")
    for iteration, sizes in ((1, "{"), (2, "{expert_model_parallel_size: 2, ")):
        save_checkpoint(tmp_path, iteration, shards, {}, config.replace("parallel: {", f"parallel: {sizes}"))
    for iteration, ranks in ((1, "data-parallel 1"), (2, "data-parallel 1, expert-parallel 2")):
        assert main(["ls", str(tmp_path), "--iteration", str(iteration)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].endswith(f"by 1 rank: tensor-parallel 1, pipeline 1, {ranks}")
        assert lines[2] == "  model: 4 layers, 64 hidden, 8 heads, 4 2 experts, 32 tokens per sample"


def test_every_checkpoint_has_a_line_and_the_newest_a_description(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(root)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    first, second, third = (line.split() for line in lines[:3])
    assert (first[0], first[-1]) == ("iter_0000100", "complete")
    assert second[0] == "iter_0000200"
    assert (third[0], third[-2:]) == ("iter_0000300", ["complete", "(newest)"])
    assert "by 1 rank: tensor-parallel 1, pipeline 1, data-parallel 1" in lines[3]
    assert lines[4] == "  model: 4 layers, 64 hidden, 8 heads, 32 tokens per sample"
    assert lines[5] == "  position: iteration 300, consumed samples 2,400, skipped 2"
    rows = {line.split()[0]: line.split()[1:] for line in lines[6:]}
    assert rows["model"] == ["2", "tensors", "15", "numbers", "30", "bytes", "bfloat16"]
    assert rows["optimizer.exp_avg"][:3] == ["1", "tensors", "12"]
    assert rows["compressor"][-1] == "float32"
    assert "shard_00000.bin" in rows
    assert "layers.0" not in out


def test_json_holds_everything(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, listing = _listed(root, "--verify", capsys=capsys)
    assert (status, listing["folder"], listing["problem"]) == (0, str(root), None)
    assert [entry["iteration"] for entry in listing["checkpoints"]] == [100, 200, 300]
    assert [entry["newest"] for entry in listing["checkpoints"]] == [False, False, True]
    entry = listing["checkpoints"][0]
    assert (entry["state"], entry["ranks"]) == ("verified", 1)
    assert entry["kinds"]["model"] == {"tensors": 2, "numbers": 15, "bytes": 30, "dtypes": ["bfloat16"]}
    assert entry["shapes"]["compressor.dp-grad.residual"] == ["float32", [5]]
    assert entry["config"]["model"]["hidden_size"] == 64
    folder = root / "iter_0000100"
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.name in entry["files"]}
    assert entry["files"] == files
    assert entry["bytes"] == sum(files.values()) > 100


@pytest.mark.parametrize(("shift", "found_by"), [(0, "--verify"), (3, None)], ids=["a byte", "a length"])
def test_damage_is_found_by_sizes_or_by_reading(
    root: Path, capsys: pytest.CaptureFixture[str], shift: int, found_by: str | None
) -> None:
    _damage(root, 200, shift)
    status, listing = _listed(root, capsys=capsys)
    assert status == (0 if found_by else 2)
    status, listing = _listed(root, "--verify", capsys=capsys)
    states = [entry["state"] for entry in listing["checkpoints"]]
    assert (status, states) == (2, ["verified", "damaged", "verified"])
    assert "iter_0000200/shard_00000.bin is " in listing["checkpoints"][1]["problem"]
    assert main(["ls", str(root), "--verify"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "damaged: " in lines[1]


def test_a_damaged_table_of_contents_is_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "iter_0000300" / "metadata.json").write_text("{}")
    assert main(["ls", str(root)]) == 2
    line = capsys.readouterr().out.splitlines()[2]
    assert line.endswith("metadata.json is damaged: its checksum does not match (newest)")


def test_one_checkpoint_by_its_iteration_or_its_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([str(root), "--iteration", "200"], [str(root / "iter_0000200")]):
        assert main(["ls", *words, "--tensors", "--config"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("iter_0000200 ")
        assert "iter_0000300" not in out
        assert "  model.layers.0.weight  bfloat16 [3, 4]\n" in out
        assert "    hidden_size: 64\n" in out


def test_a_tracker_of_a_missing_checkpoint_is_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("700")
    assert main(["ls", str(root)]) == 0
    assert f"warning: {tracker} names iteration 700, which is not there" in capsys.readouterr().out
    tracker.unlink()
    _, listing = _listed(root, capsys=capsys)
    assert listing["problem"] == f"{tracker} is missing: --load takes the newest complete checkpoint"


@pytest.mark.parametrize("content", ["foo", None])
def test_a_tracker_that_load_refuses_is_reported(
    content: str | None, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    if content is None:
        tracker.mkdir()
    else:
        tracker.write_text(content)
    _, listing = _listed(root, capsys=capsys)
    message = "holds 'foo' instead of an iteration or 'release'" if content else "Is a directory"
    assert str(tracker) in listing["problem"]
    assert message in listing["problem"]
    assert "takes the newest" not in listing["problem"]
    with pytest.raises(UserError, match=message):
        read_tracker(root)


def _hugging_face(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def _classic(folder: Path) -> None:
    (folder / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    (folder / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (None, [], "holds no checkpoint; name the folder that --save wrote to"),
        (_hugging_face, [], "is a Hugging Face folder; tools/ckpt_convert.py --to megatron-cc"),
        (_classic, [], "is a classic checkpoint of Megatron; tools/ckpt_convert.py"),
        (lambda folder: folder.rmdir(), [], "is not a folder; name the one that --save wrote to"),
    ],
)
def test_other_folders_are_named(
    tmp_path: Path, error_line: Callable[[], str], make: Any, flags: list[str], message: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    if make is not None:
        make(folder)
    assert main(["ls", str(folder), *flags]) == 2
    error = error_line()
    assert error.startswith(f"ckpt: error: {folder} {message}")


def test_a_missing_iteration_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(root), "--iteration", "150"]) == 2
    assert "--iteration 150: " in (error := capsys.readouterr().err)
    assert error.endswith("there are 100, 200, 300\n")


def test_a_path_that_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "a" * 300]) == 2
    assert capsys.readouterr().err == f"ckpt: error: {'a' * 300}: File name too long\n"


def test_the_current_folder_may_be_a_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root / "iter_0000200")
    assert main(["ls", "."]) == 0
    assert capsys.readouterr().out.startswith("iter_0000200 ")
