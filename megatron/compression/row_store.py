"""Store of equally sized rows by number: the most recently used in memory, the others in a file of this process.

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


_BEHIND = 8
"""Most rows waiting to be written."""


class RowStore:
    """Store of tensors of the same shape and dtype, by integer name.

    Args:
        memory: most rows to keep in memory, the most recently used; None for all.
        folder: folder of the file with the other rows, which is deleted with this object and not checkpointed.
    """

    def __init__(self, memory: int | None = None, folder: str | None = None) -> None:
        self.memory = memory
        self.folder = folder
        self._near: OrderedDict[int, Tensor] = OrderedDict()
        self._far: dict[int, tuple[int, Future[int]]] = {}
        self._ahead: dict[int, Future[Tensor]] = {}
        self._behind: deque[Future[int]] = deque()
        self._worker: ThreadPoolExecutor | None = None
        self._free: list[int] = []
        self._slots = 0
        self._file: IO[bytes] | None = None
        self._like: Tensor | None = None

    def __contains__(self, name: int) -> bool:
        return name in self._near or name in self._far

    def __len__(self) -> int:
        return len(self._near) + len(self._far)

    def names(self) -> list[int]:
        """All names."""
        return [*self._near, *self._far]

    def put(self, name: int, row: Tensor) -> None:
        """Store a row; the least recently used row may move to the file."""
        self._drop_far(name)
        self._near[name] = row
        self._near.move_to_end(name)
        while self.memory is not None and len(self._near) > self.memory:
            oldest, oldest_row = self._near.popitem(last=False)
            cpu_row = oldest_row.detach().cpu().contiguous()
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="samples")
                self._like = torch.empty_like(oldest_row, device=oldest_row.device)
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._slots = self._slots, self._slots + 1
            while len(self._behind) >= _BEHIND:
                self._behind.popleft().result()
            written = self._worker.submit(self._store, slot, cpu_row)
            self._behind.append(written)
            self._far[oldest] = (slot, written)

    def prefetch(self, name: int) -> None:
        """Begin to read a row that is needed soon, if it is in the file."""
        if name in self._far and name not in self._ahead:
            self._ahead[name] = self._submit_read(name)

    def get(self, name: int) -> Tensor:
        """Return a row; it counts as used.

        Raises:
            KeyError: when there is no such row.
            DamagedRowError: when the row in the file is damaged.
            RowFileError: when the file cannot be written.
        """
        if name in self._near:
            self._near.move_to_end(name)
            return self._near[name]
        self.prefetch(name)
        row = self._ahead[name].result()
        self.put(name, row)
        return row

    def discard(self, name: int) -> None:
        """Remove a row, if it exists."""
        self._near.pop(name, None)
        self._drop_far(name)

    def peek(self, name: int) -> Tensor:
        """Return a row; it does not count as used."""
        return self._near[name] if name in self._near else self._submit_read(name).result()

    def _drop_far(self, name: int) -> None:
        # A write to the slot is queued behind pending reads of it.
        self._ahead.pop(name, None)
        if name in self._far:
            self._free.append(self._far.pop(name)[0])

    def _submit_read(self, name: int) -> Future[Tensor]:
        assert self._worker is not None
        slot, written = self._far[name]
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
        assert self._like is not None
        checksum = written.result()
        assert self._file is not None
        size = self._like.numel() * self._like.element_size()
        self._file.seek(slot * size)
        data = bytearray(self._file.read(size))
        if len(data) != size or zlib.crc32(data) != checksum:
            raise DamagedRowError(f"the memory of sample {name} on disk is damaged; go on from the last checkpoint")
        flat = torch.frombuffer(data, dtype=torch.uint8)
        return flat.view(self._like.dtype).view(self._like.shape).to(self._like.device)
