"""Storage for torch.distributed.checkpoint: a file of raw bytes per rank, and ``metadata.json``.

Writer and reader store an error in ``problem`` instead of raising it: torch would pass the exception through its
collectives as a pickled object, and the caller shares errors among the ranks anyway.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
import stat
import zlib
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.base.atomic import fsync_directory
from megatron.base.errors import first_line
from megatron.base.regular import open_regular
from megatron.checkpoint.certificate import CERTIFICATE, Certificate, Statements
from megatron.checkpoint.files import write_synced
from megatron.checkpoint.manifest import MANIFEST, Manifest, StoredItem

READ_BYTES = 1 << 24


def write_all(stream: io.FileIO, data: memoryview) -> None:
    """Write all of ``data``; a system call writes at most 2 GiB."""
    while data:
        data = data[stream.write(data) :]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a tensor in row-major order, without a copy if the tensor is contiguous in CPU memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def describe_error(error: Exception, path: Path) -> str:
    """Describe a file error in a single line."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: {error.strerror}: free some space, or choose another --save"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{path}: {reason or first_line(error)}"


def _completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ShardWriter(StorageWriter):
    """Writer of each rank's items to ``shard_<rank>.bin``; the coordinator writes all other files.

    Args:
        folder: an existing folder for this checkpoint.
        iteration: iteration in the manifest.
        world_size: number of writing ranks.
        documents: small files, by name.
        statements: the run's statements, for a certificate; None on all ranks for none.
    """

    def __init__(
        self,
        folder: Path,
        iteration: int,
        world_size: int,
        documents: Mapping[str, bytes],
        statements: Statements | None = None,
    ) -> None:
        self.folder = folder
        self.iteration = iteration
        self.world_size = world_size
        self.documents = documents
        self.statements = statements
        self.problem: str | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer serves a single save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the name of each rank's file to its plan."""
        return [dataclasses.replace(plan, storage_data=f"shard_{rank:05d}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of the plan in order, and wait until they are on disk."""
        results: list[WriteResult] = []
        path = self.folder / plan.storage_data
        try:
            if plan.items:
                offset = 0
                digest = None if self.statements is None else sha256()
                with path.open("wb", buffering=0) as stream:
                    for item in plan.items:
                        value = planner.resolve_data(item)
                        assert isinstance(value, Tensor)
                        data = tensor_bytes(value)
                        write_all(stream, data)
                        if digest is not None:
                            digest.update(data)
                        stored = StoredItem(path.name, offset, len(data), zlib.crc32(data))
                        results.append(WriteResult(item.index, len(data), stored))
                        offset += len(data)
                    os.fsync(stream.fileno())
                if digest is not None:
                    results.append(WriteResult(MetadataIndex(path.name), 0, digest.hexdigest()))
        except Exception as error:
            self.problem = describe_error(error, path)
            results = [WriteResult(MetadataIndex("failed"), 0, None)]
        return _completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the documents and the manifest on the coordinator, unless a rank has failed."""
        stored = {result.index: result.storage_data for rank in results for result in rank}
        if None in stored.values():
            return
        try:
            items = {index: item for index, item in stored.items() if isinstance(item, StoredItem)}
            digests = {index.fqn: digest for index, digest in stored.items() if isinstance(digest, str)}
            entries = metadata.state_dict_metadata
            manifest = Manifest(
                self.iteration,
                self.world_size,
                files={},
                documents={},
                tensors={n: entry for n, entry in entries.items() if isinstance(entry, TensorStorageMetadata)},
                items={(i.fqn, tuple(i.offset or ())): s for i, s in items.items()},
            )
            for name, data in self.documents.items():
                write_synced(self.folder / name, data)
                manifest.documents[name] = StoredItem(name, 0, len(data), zlib.crc32(data))
            for item in [*manifest.documents.values(), *items.values()]:
                manifest.files[item.file] = max(manifest.files.get(item.file, 0), item.offset + item.length)
            problem = check_file_sizes(self.folder, manifest.files)
            if problem is not None:
                raise RuntimeError(f"{problem} (do all ranks share this file system?)")
            documents = {**self.documents, MANIFEST: manifest.render()}
            write_synced(self.folder / MANIFEST, documents[MANIFEST])
            if self.statements is not None:
                digests |= {name: sha256(data).hexdigest() for name, data in documents.items()}
                certificate = Certificate(self.iteration, self.world_size, digests, self.statements)
                write_synced(self.folder / CERTIFICATE, certificate.render())
            fsync_directory(self.folder)
        except Exception as error:
            path = Path(error.filename) if isinstance(error, OSError) and error.filename else self.folder
            self.problem = describe_error(error, path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a local path."""
        return "://" not in str(checkpoint_id)


class ShardReader(StorageReader):
    """Reader of boxes of tensors, after ``check_file_sizes`` and ``check_items`` have checked the files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sizes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }
        self.problem: str | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader serves a single checkpoint."""

    def read_metadata(self) -> Metadata:
        """The manifest as torch's metadata."""
        storage = {MetadataIndex(name, offsets): item for (name, offsets), item in self.manifest.items.items()}
        return Metadata(dict(self.manifest.tensors), storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy all items of the plan to their target tensors, file by file."""
        by_file: dict[str, list[tuple[StoredItem, ReadItem]]] = {}
        for read in plan.items:
            assert read.storage_index.offset is not None
            item = self.manifest.items[read.storage_index.fqn, tuple(read.storage_index.offset)]
            by_file.setdefault(item.file, []).append((item, read))
        for name, reads in by_file.items():
            try:
                with open_regular(self.folder / name) as stream:
                    for item, read in sorted(reads, key=lambda pair: pair[0].offset):
                        target = planner.resolve_tensor(read).detach()
                        target.copy_(self._read_box(stream, item, read))
                        planner.commit_tensor(read, target)
            except Exception as error:
                self.problem = self.problem or describe_error(error, self.folder / name)
        return _completed_future(None)

    def _read_box(self, stream: io.FileIO, item: StoredItem, read: ReadItem) -> Tensor:
        """Read the rows of a stored box that ``read`` needs, and narrow them to the requested box."""
        entry = self.manifest.tensors[read.storage_index.fqn]
        shape = self.sizes[read.storage_index.fqn, tuple(read.storage_index.offset or ())]
        starts = list(read.storage_offsets)
        begin, length = item.offset, item.length
        if shape:
            row_bytes = math.prod(shape[1:]) * entry.properties.dtype.itemsize
            begin += starts[0] * row_bytes
            length = read.lengths[0] * row_bytes
            shape = (read.lengths[0], *shape[1:])
            starts[0] = 0
        raw = torch.empty(length, dtype=torch.uint8)
        stream.seek(begin)
        _read_exactly(stream, raw.numpy().data)
        box = raw.view(entry.properties.dtype).view(shape)
        return narrow_tensor_by_index(box, starts, read.lengths)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a local path."""
        return "://" not in str(checkpoint_id)


def _read_exactly(stream: io.FileIO, target: memoryview) -> None:
    while target:
        count = stream.readinto(target)
        if not count:
            raise EOFError("the file ends too early")
        target = target[count:]


def check_file_sizes(folder: Path, files: Mapping[str, int]) -> str | None:
    """Check files; return an error message for the first that is missing or has the wrong size, else None."""
    for name, size in files.items():
        path = folder / name
        try:
            status = path.stat()
        except OSError as error:
            return f"{path} is missing" if isinstance(error, FileNotFoundError) else describe_error(error, path)
        actual = status.st_size
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is not a regular file"
        if actual != size:
            return f"{path} is {'truncated' if actual < size else 'damaged'}: {actual} bytes instead of {size}"
    return None


def check_items(folder: Path, items: Iterable[StoredItem]) -> str | None:
    """Check items; return an error message for the first with a wrong checksum, else None."""
    by_file: dict[str, list[StoredItem]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    buffer = memoryview(bytearray(READ_BYTES))
    for name, stored in by_file.items():
        path = folder / name
        try:
            with open_regular(path) as stream:
                for item in stored:
                    stream.seek(item.offset)
                    crc32, remaining = 0, item.length
                    while remaining:
                        chunk = buffer[: min(remaining, len(buffer))]
                        _read_exactly(stream, chunk)
                        crc32 = zlib.crc32(chunk, crc32)
                        remaining -= len(chunk)
                    if crc32 != item.crc32:
                        byte_range = f"bytes {item.offset} to {item.offset + item.length}"
                        return f"{path} is damaged: {byte_range} do not match their checksum"
        except (OSError, EOFError) as error:
            return describe_error(error, path)
    return None


def read_into(folder: Path, item: StoredItem, memory: memoryview) -> bool:
    """Read an item into memory of its length; return whether the read succeeded and the checksum is correct."""
    try:
        with open_regular(folder / item.file) as stream:
            stream.seek(item.offset)
            _read_exactly(stream, memory)
    except (OSError, EOFError):
        return False
    return zlib.crc32(memory) == item.crc32
