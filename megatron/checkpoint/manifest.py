"""``metadata.json``: the contents of a checkpoint, the location of each box, and checksums.

The file is JSON with a checksum of its content in canonical form, so that any changed byte is noticed. It is
converted to torch.distributed.checkpoint's ``Metadata`` without unpickling anything.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from megatron.base.errors import UserError
from megatron.base.regular import read_regular
from megatron.checkpoint.boxes import Box, clip, disjoint_parts
from megatron.kernels.dtypes import dtype_from_name, name_of_dtype

MANIFEST = "metadata.json"
FORMAT = 1


@dataclass(frozen=True)
class StoredItem:
    """A byte range of a file: ``length`` bytes from ``offset``, with their CRC-32."""

    file: str
    offset: int
    length: int
    crc32: int


@dataclass
class Manifest:
    """The manifest of a checkpoint.

    Args:
        iteration: training iteration; "release" for a checkpoint outside a run.
        world_size: number of ranks that wrote the checkpoint.
        files: sizes in bytes of all other files.
        documents: small files that are read in full (common.json, config.yaml), as items.
        tensors: shapes, dtypes and stored boxes of the global tensors, by name.
        items: byte ranges of the stored boxes, by name and offsets.
    """

    iteration: int | str
    world_size: int
    files: dict[str, int]
    documents: dict[str, StoredItem]
    tensors: dict[str, TensorStorageMetadata]
    items: dict[tuple[str, tuple[int, ...]], StoredItem]

    def items_of(self, names: Collection[str]) -> list[StoredItem]:
        """The stored items of the named tensors, in file order."""
        items = [item for (name, _), item in self.items.items() if name in names]
        return sorted(items, key=lambda item: (item.file, item.offset))

    def render(self) -> bytes:
        """The content of the file."""
        tensors = {
            name: {
                "dtype": name_of_dtype(tensor.properties.dtype),
                "shape": list(tensor.size),
                "chunks": [
                    [list(c.offsets), list(c.sizes), *_row(self.items[name, tuple(c.offsets)])] for c in tensor.chunks
                ],
            }
            for name, tensor in self.tensors.items()
        }
        content = {
            "format": FORMAT,
            "byteorder": sys.byteorder,
            "iteration": self.iteration,
            "world_size": self.world_size,
            "files": self.files,
            "documents": {name: _row(item) for name, item in self.documents.items()},
            "blobs": {},  # reserved by the format; always empty
            "tensors": tensors,
        }
        return _seal(content)


def _row(item: StoredItem) -> list[str | int]:
    return [item.file, item.offset, item.length, item.crc32]


def _seal(content: dict[str, Any]) -> bytes:
    """Render content with its checksum."""
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f'{{"crc32":{zlib.crc32(body.encode())},"content":{body}}}\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``metadata.json``.

    Raises:
        UserError: when it is missing, damaged, or of a later format; the message has the file's name.
    """
    path = folder / MANIFEST
    try:
        data = read_regular(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    try:
        content = json.loads(data)["content"]
        intact = _seal(content) == data
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged: its checksum does not match")
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a checkpoint's table of contents: it holds a {type(content).__name__}")
    if content.get("format") != FORMAT or content.get("byteorder") != sys.byteorder:
        raise UserError(
            f"{path} has format {content.get('format')} and byte order {content.get('byteorder')}; this "
            f"version reads format {FORMAT} and {sys.byteorder}"
        )
    try:
        files = {name: _count(size, f"the size of {name}") for name, size in content["files"].items()}
        if any(Path(name).name != name or "\0" in name for name in files):
            raise ValueError("a file lies outside the checkpoint's folder")
        iteration = content["iteration"]
        manifest = Manifest(
            iteration="release" if iteration == "release" else _count(iteration, "the iteration"),
            world_size=_count(content["world_size"], "the number of ranks", minimum=1),
            files=files,
            documents={name: _item(row, files) for name, row in content["documents"].items()},
            tensors={},
            items={},
        )
        for name, entry in content["tensors"].items():
            dtype = dtype_from_name(entry["dtype"])
            torch.empty(1, dtype=dtype).view(torch.uint8)  # raises unless its tensors can be viewed as bytes
            shape = _counts(entry["shape"], f"the shape of {name}")
            chunks = []
            for offsets, sizes, *row in entry["chunks"]:
                item = _item(row, files)
                location = f"a chunk of {name}"
                box: Box = (_counts(offsets, location), _counts(sizes, location))
                if clip(box, shape) != box or item.length != math.prod(sizes) * dtype.itemsize:
                    raise ValueError(f"{name} has a chunk that does not fit")
                manifest.items[name, box[0]] = item
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            covered = disjoint_parts([(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks])
            volume = sum(math.prod(chunk.sizes) for chunk in chunks)
            if not volume == sum(math.prod(sizes) for _, (_, sizes) in covered) == math.prod(shape):
                raise ValueError(f"{name} is incomplete")
            properties = TensorProperties(dtype=dtype)
            manifest.tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        return manifest
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        # repr: the plain text of a multi-line error or a missing key says little
        raise UserError(f"{path} is not a checkpoint's table of contents: {error!r}") from error


def _count(value: object, description: str, minimum: int = 0) -> int:
    """Check that a value read from a file is an integer in range."""
    if type(value) is not int or not minimum <= value < 1 << 62:
        raise ValueError(f"{description} is {str(value)[:40]}")
    return value


def _counts(values: Any, description: str) -> tuple[int, ...]:
    return tuple(_count(value, description) for value in values)


def _item(row: list[Any], files: dict[str, int]) -> StoredItem:
    file, *numbers = row
    offset, length, crc32 = _counts(numbers, f"an item in {file}")
    if not offset + length <= files[file]:
        raise ValueError(f"an item lies beyond the end of {file}")
    return StoredItem(file, offset, length, crc32)
