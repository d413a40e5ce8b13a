"""Headers and ``.metadata`` that let torch.distributed.checkpoint's own readers read our shards.

Those readers call ``torch.load`` for each stored chunk. Its legacy stream format is a few pickled objects followed by
the tensor's raw bytes, so a chunk costs a header of some hundred bytes and no copy. Both are for other readers: our own
loader uses ``metadata.json``, which has the location and the checksum of the raw bytes, and unpickles nothing.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron.checkpoint.manifest import Manifest

TORCH_METADATA = ".metadata"

_MAGIC, _VERSION, _PICKLE = 0x1950A86A20F9469CFC6C, 1001, 2  # from torch.serialization
_STORAGES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""Tensors of other dtypes have no header and are invisible to other readers."""


class _Bytes:
    """Placeholder for the storage of the tensor that follows."""


class _Following:
    """A contiguous tensor whose bytes follow; unpickles to that tensor."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        return torch._utils._rebuild_tensor_v2, (_Bytes(), 0, self.shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    """A pickler that names the storage as ``torch.save`` does."""

    def __init__(self, stream: io.BytesIO, storage: type, numel: int) -> None:
        super().__init__(stream, protocol=_PICKLE)
        self._named = ("storage", storage, "0", "cpu", numel, None)

    def persistent_id(self, obj: Any) -> Any:
        return self._named if isinstance(obj, _Bytes) else None


def header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """The header before a tensor's bytes, determined by dtype and shape; empty for dtypes without a header."""
    storage = _STORAGES.get(dtype)
    if storage is None:
        return b""
    stream, numel = io.BytesIO(), math.prod(shape)
    sizes = {"short": 2, "int": 4, "long": 4}
    info = {"protocol_version": _VERSION, "little_endian": sys.byteorder == "little", "type_sizes": sizes}
    for word in (_MAGIC, _VERSION, info):
        stream.write(pickle.dumps(word, protocol=_PICKLE))
    _Pickler(stream, storage, numel).dump(_Following(shape))
    stream.write(pickle.dumps(["0"], protocol=_PICKLE))
    return stream.getvalue() + struct.pack("=q", numel)


def torch_metadata(manifest: Manifest) -> bytes:
    """The ``.metadata`` of a checkpoint: its tensors, whose chunks include their headers."""
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in manifest.tensors.items():
        if tensor.properties.dtype not in _STORAGES:
            continue
        entries[name] = tensor
        for chunk in tensor.chunks:
            item = manifest.items[name, tuple(chunk.offsets)]
            before = len(header(tensor.properties.dtype, chunk.sizes))
            storage_info = _StorageInfo(item.file, item.offset - before, item.length + before)
            storage[MetadataIndex(name, chunk.offsets)] = storage_info
    return pickle.dumps(Metadata(dict(entries), storage_data=storage))
