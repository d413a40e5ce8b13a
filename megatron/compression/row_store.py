"""Rows of equal size by number: the newest in memory, the rest in a file of this process."""

from __future__ import annotations

import tempfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from megatron.compression.options import CompressorFault


class DamagedRowError(CompressorFault):
    """A row on disk is not what was written."""


class RowStore:
    """Keeps tensors of one shape and dtype under integer names.

    Args:
        memory: rows that stay in memory, the last used ones; None for all.
        folder: of the file that holds the others; it is deleted with this object, and is no part of a checkpoint.
    """

    def __init__(self, memory: int | None = None, folder: str | None = None) -> None:
        self.memory = memory
        self.folder = folder
        self._near: OrderedDict[int, Tensor] = OrderedDict()
        self._far: dict[int, tuple[int, int]] = {}
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
        """Keeps a row; the one that was used longest ago may go to the file."""
        self._drop_far(name)
        self._near[name] = row
        self._near.move_to_end(name)
        while self.memory is not None and len(self._near) > self.memory:
            oldest, kept = self._near.popitem(last=False)
            self._write(oldest, kept)

    def get(self, name: int) -> Tensor:
        """A row; it counts as used.

        Raises:
            KeyError: when there is none.
            DamagedRowError: when the file does not hold what was written.
        """
        if name in self._near:
            self._near.move_to_end(name)
            return self._near[name]
        slot, checksum = self._far[name]
        row = self._read(slot, checksum, name)
        self.put(name, row)
        return row

    def discard(self, name: int) -> None:
        """Forgets a row, if it is there."""
        self._near.pop(name, None)
        self._drop_far(name)

    def peek(self, name: int) -> Tensor:
        """A row, which stays where it is."""
        return self._near[name] if name in self._near else self._read(*self._far[name], name)

    def _drop_far(self, name: int) -> None:
        if name in self._far:
            self._free.append(self._far.pop(name)[0])

    def _write(self, name: int, row: Tensor) -> None:
        data = row.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        if self._file is None:
            folder = None if self.folder is None else Path(self.folder)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(prefix="samples-", dir=folder)  # noqa: SIM115  # open for the run
            self._like = torch.empty_like(row, device=row.device)
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        self._file.seek(slot * len(data))
        self._file.write(data)
        self._far[name] = (slot, zlib.crc32(data))

    def _read(self, slot: int, checksum: int, name: int) -> Tensor:
        assert self._file is not None
        assert self._like is not None
        size = self._like.numel() * self._like.element_size()
        self._file.seek(slot * size)
        data = self._file.read(size)
        if len(data) != size or zlib.crc32(data) != checksum:
            raise DamagedRowError(f"the memory of sample {name} on disk is damaged; go on from the last checkpoint")
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return flat.view(self._like.dtype).view(self._like.shape).to(self._like.device)
