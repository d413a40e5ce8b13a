"""What torch.distributed.checkpoint's own tools make of our checkpoints."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron.checkpoint.files import folder_name
from megatron.checkpoint.load import load_tensors
from megatron.checkpoint.logical import LogicalShard, TensorBox, shard_of_local
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.torch_stream import _STORAGES, TORCH_METADATA, header

TYPES = list(_STORAGES)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    torch.manual_seed(len(shape))
    return (torch.randn(shape) * 50).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 1, 5), (0, 3)])
def test_a_header_and_the_bytes_are_a_stream_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = _tensor(dtype, shape)
    raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    loaded = torch.load(io.BytesIO(header(dtype, shape) + raw), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, x)


def _save(root: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of tensors of all types, one of them in parts, and what it holds."""
    tensors = {f"optimizer.{dtype}": _tensor(dtype, (3, 4)) for dtype in TYPES}
    tensors |= {"model.scalar": torch.tensor(1.5), "model.none": torch.zeros(0, 2)}
    shards = {name: shard_of_local(x, (0,) * x.dim(), x.shape) for name, x in tensors.items()}
    parts = torch.randn(5, 4)
    pieces = [TensorBox((0, 0), parts[:2]), TensorBox((2, 0), parts[2:])]
    shards["model.parts"] = LogicalShard((5, 4), parts.dtype, pieces)
    save_checkpoint(root, 3, shards, {"a": 1}, "b: 2\n")
    return {**tensors, "model.parts": parts}


def test_dcp_to_torch_save_gives_the_whole_state(tmp_path: Path) -> None:
    tensors = _save(tmp_path / "saved")
    dcp_to_torch_save(tmp_path / "saved" / folder_name(3), tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    del tensors["model.none"]  # without elements it has no part
    assert loaded.keys() == tensors.keys()
    for name, x in tensors.items():
        assert loaded[name].dtype == x.dtype
        assert torch.equal(loaded[name], x), name


def test_dcp_load_reads_single_tensors(tmp_path: Path) -> None:
    tensors = _save(tmp_path)
    state = {"model.parts": torch.zeros(5, 4)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / folder_name(3)), no_dist=True)
    assert torch.equal(state["model.parts"], tensors["model.parts"])


def test_we_do_not_need_what_is_written_for_others(tmp_path: Path) -> None:
    tensors = _save(tmp_path)
    path = tmp_path / folder_name(3) / TORCH_METADATA
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(len(data)))
    loaded = {name: torch.zeros_like(x) for name, x in tensors.items()}
    load_tensors(tmp_path, 3, {name: shard_of_local(x, (0,) * x.dim(), x.shape) for name, x in loaded.items()})
    assert all(torch.equal(loaded[name], x) for name, x in tensors.items())
