"""Damage is detected before memory changes; the message names the file and another checkpoint."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.base.errors import UserError
from megatron.checkpoint.find import complete_iterations
from megatron.checkpoint.load import load_common, load_config_yaml, load_tensors
from megatron.checkpoint.logical import LogicalShard, shard_of_local
from megatron.checkpoint.save import save_checkpoint

FILES = ("common.json", "config.yaml", "metadata.json", "shard_00000.bin")


def shards(x: torch.Tensor, y: torch.Tensor) -> dict[str, LogicalShard]:
    return {"x": shard_of_local(x, (0, 0), x.shape), "y": shard_of_local(y, (0,), y.shape)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints; tests damage the second."""
    for iteration in (1, 2):
        x = torch.arange(12.0).view(3, 4) * iteration
        save_checkpoint(tmp_path, iteration, shards(x, torch.ones(5)), {"i": iteration}, "a: 1\n")
    return tmp_path


def load_everything(root: Path) -> None:
    """Load iteration 2, and check the values; after a failure, that no memory has changed."""
    x, y = torch.full((3, 4), -1.0), torch.full((5,), -1.0)
    try:
        load_tensors(root, 2, shards(x, y))
    except UserError:
        assert x.eq(-1).all()
        assert y.eq(-1).all()
        raise
    assert torch.equal(x, 2 * torch.arange(12.0).view(3, 4))
    assert y.eq(1).all()
    load_common(root, 2)
    load_config_yaml(root, 2)


def assert_refused(root: Path, name: str) -> None:
    with pytest.raises(UserError) as error:
        load_everything(root)
    message = str(error.value)
    assert str(root / "iter_0000002" / name) in message
    assert "iteration 1 is complete: to load it, write 1 into" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_detected(root: Path, name: str) -> None:
    path = root / "iter_0000002" / name
    data = path.read_bytes()
    for length in {0, 1, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:length])
        assert_refused(root, name)
        assert complete_iterations(root) == [1]
    path.unlink()
    assert_refused(root, name)
    path.write_bytes(data)
    load_everything(root)


def _stored(shard: Path) -> Sequence[int]:
    """Positions of the bytes of tensors; the headers between them are for other tools."""
    content = json.loads((shard.parent / "metadata.json").read_text())["content"]
    spans = [chunk[3:5] for tensor in content["tensors"].values() for chunk in tensor["chunks"]]
    return [at for offset, length in spans for at in range(offset, offset + length)]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_detected(root: Path, name: str) -> None:
    path = root / "iter_0000002" / name
    data = bytearray(path.read_bytes())
    generator = random.Random(name)
    stored = _stored(path) if name.startswith("shard") else range(len(data))
    for position in {stored[0], stored[-1], *generator.sample(stored, min(20, len(stored)))}:
        bit = 1 << generator.randrange(8)
        data[position] ^= bit
        path.write_bytes(data)
        assert_refused(root, name)
        data[position] ^= bit
    path.write_bytes(data)
    load_everything(root)


def test_a_longer_file_is_detected(root: Path) -> None:
    with (root / "iter_0000002" / "shard_00000.bin").open("ab") as stream:
        stream.write(b"x")
    assert_refused(root, "shard_00000.bin")


def test_damage_in_a_tensor_that_is_not_loaded_is_ignored(root: Path) -> None:
    path = root / "iter_0000002" / "shard_00000.bin"
    content = json.loads((path.parent / "metadata.json").read_text())["content"]
    _offsets, _sizes, _file, offset, _length, _crc32 = content["tensors"]["y"]["chunks"][0]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    x = torch.zeros(3, 4)
    load_tensors(root, 2, {"x": shard_of_local(x, (0, 0), (3, 4))}, allow_unexpected=lambda name: True)
    assert x.sum() == 132
    assert_refused(root, "shard_00000.bin")


def reseal(path: Path, **changes: object) -> None:
    """Rewrites metadata.json with a valid checksum."""
    content = json.loads(path.read_text())["content"]
    content.update(changes)
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(f'{{"crc32":{zlib.crc32(body.encode())},"content":{body}}}\n')


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"byteorder": "middle"},
        {"files": {"../../secret": 1}},
        {"files": {"shard_00000.bin": 3}},
        {"tensors": {"x": {"dtype": "save", "shape": [1], "chunks": []}}},
        {"tensors": {"x": {"dtype": "float32", "shape": [3, 4], "chunks": []}}},
        {"tensors": {"x": {"dtype": "float32", "shape": [1], "chunks": [[[1], [1], "shard_00000.bin", 0, 4, 0]]}}},
        {"tensors": {"x": {"dtype": "float32", "shape": [1], "chunks": [[[0], [1], "shard_00000.bin", 0, 5, 0]]}}},
        {"tensors": []},
        {"documents": None},
    ],
)
def test_an_invalid_table_of_contents_is_refused(root: Path, changes: dict[str, object]) -> None:
    reseal(root / "iter_0000002" / "metadata.json", **changes)
    assert_refused(root, "metadata.json")


def test_blobs_are_ignored(root: Path) -> None:
    """The format of checkpoints allows them, but nothing writes them."""
    reseal(root / "iter_0000002" / "metadata.json", blobs={"per_rank/00000": ["shard_00000.bin", 0, 4, 0]})
    load_everything(root)


def test_the_message_without_another_checkpoint(root: Path) -> None:
    (root / "iter_0000001" / "metadata.json").unlink()
    (root / "iter_0000002" / "metadata.json").unlink()
    with pytest.raises(UserError, match="has no other complete checkpoint"):
        load_everything(root)
