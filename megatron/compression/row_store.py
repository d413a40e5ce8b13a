"""Store of equally sized rows: the most recently used in memory, the others in a file of this process.

A worker thread reads ahead and writes behind, in the order of the requests, so rows can be loaded (``prefetch``) during
computation.
"""

from __future__ import annotations

import tempfile
import zlib
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from megatron.compression.options import CompressorFault


class DamagedRowError(CompressorFault):
    """Raised when a row on disk differs from the row that was written."""


class RowFileError(CompressorFault):
    """Raised when the file of rows cannot be written."""


_MAX_PENDING_WRITES = 8
"""Maximum number of rows waiting to be written."""


class RowStore:
    """Store of tensors of the same shape and dtype, by integer name.

    Args:
        memory: maximum number of rows in memory, the most recently used; None for all.
        folder: folder of the file with the other rows, which is deleted with this object and not checkpointed.
    """

    def __init__(self, memory: int | None = None, folder: str | None = None) -> None:
        self.memory = memory
        self.folder = folder
        self._in_memory: OrderedDict[int, Tensor] = OrderedDict()
        self._on_disk: dict[int, tuple[int, Future[int]]] = {}
        self._pending_reads: dict[int, Future[Tensor]] = {}
        self._pending_writes: deque[Future[int]] = deque()
        self._worker: ThreadPoolExecutor | None = None
        self._free_slots: list[int] = []
        self._slot_count = 0
        self._file: IO[bytes] | None = None
        self._template: Tensor | None = None

    def __contains__(self, name: int) -> bool:
        return name in self._in_memory or name in self._on_disk

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._on_disk)

    def names(self) -> list[int]:
        """All names."""
        return [*self._in_memory, *self._on_disk]

    def put(self, name: int, row: Tensor) -> None:
        """Store a row; the least recently used row may move to the file."""
        self._drop_from_disk(name)
        self._in_memory[name] = row
        self._in_memory.move_to_end(name)
        while self.memory is not None and len(self._in_memory) > self.memory:
            oldest, oldest_row = self._in_memory.popitem(last=False)
            cpu_row = oldest_row.detach().cpu().contiguous()
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="samples")
                self._template = torch.empty_like(oldest_row, device=oldest_row.device)
            if self._free_slots:
                slot = self._free_slots.pop()
            else:
                slot, self._slot_count = self._slot_count, self._slot_count + 1
            while len(self._pending_writes) >= _MAX_PENDING_WRITES:
                self._pending_writes.popleft().result()
            written = self._worker.submit(self._store, slot, cpu_row)
            self._pending_writes.append(written)
            self._on_disk[oldest] = (slot, written)

    def prefetch(self, name: int) -> None:
        """Begin to read a row that is needed soon, if it is in the file."""
        if name in self._on_disk and name not in self._pending_reads:
            self._pending_reads[name] = self._submit_read(name)

    def get(self, name: int) -> Tensor:
        """Return a row; it counts as used.

        Raises:
            KeyError: when there is no such row.
            DamagedRowError: when the row in the file is damaged.
            RowFileError: when the file cannot be written.
        """
        if name in self._in_memory:
            self._in_memory.move_to_end(name)
            return self._in_memory[name]
        self.prefetch(name)
        row = self._pending_reads[name].result()
        self.put(name, row)
        return row

    def discard(self, name: int) -> None:
        """Remove a row, if it exists."""
        self._in_memory.pop(name, None)
        self._drop_from_disk(name)

    def peek(self, name: int) -> Tensor:
        """Return a row; it does not count as used."""
        return self._in_memory[name] if name in self._in_memory else self._submit_read(name).result()

    def _drop_from_disk(self, name: int) -> None:
        # A write to the slot is queued behind pending reads of it.
        self._pending_reads.pop(name, None)
        if name in self._on_disk:
            self._free_slots.append(self._on_disk.pop(name)[0])

    def _submit_read(self, name: int) -> Future[Tensor]:
        assert self._worker is not None
        slot, written = self._on_disk[name]
        return self._worker.submit(self._load, slot, written, name)

    def _store(self, slot: int, row: Tensor) -> int:
        """Write a row, in the worker thread; return its checksum."""
        data = row.view(torch.uint8).view(-1).numpy().data
        try:
            if self._file is None:
                if self.folder is not None:
                    Path(self.folder).mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(prefix="samples-", dir=self.folder)  # noqa: SIM115  # open for the run
            self._file.seek(slot * data.nbytes)
            self._file.write(data)
        except OSError as error:
            folder = self.folder or tempfile.gettempdir()
            raise RowFileError(
                f"the memory of samples cannot be written to {folder}: {error}; make room, name another folder with "
                "folder=, or keep all samples in memory with memory=0"
            ) from error
        return zlib.crc32(data)

    def _load(self, slot: int, written: Future[int], name: int) -> Tensor:
        """Read a row, in the worker thread."""
        assert self._template is not None
        checksum = written.result()
        assert self._file is not None
        size = self._template.nbytes
        self._file.seek(slot * size)
        data = bytearray(self._file.read(size))
        if len(data) != size or zlib.crc32(data) != checksum:
            raise DamagedRowError(f"the memory of sample {name} on disk is damaged; go on from the last checkpoint")
        flat = torch.frombuffer(data, dtype=torch.uint8)
        return flat.view(self._template.dtype).view(self._template.shape).to(self._template.device)
