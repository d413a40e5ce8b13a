"""Writes safetensors files tensor by tensor; the library's own writer needs the whole file in memory.

The format: the header's length (8 bytes, little-endian), a JSON header with each tensor's dtype, shape and offsets,
then the tensors' bytes in order, row-major (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of the dtypes of weights in safetensors files; other formats store the same dtypes."""
_BLOCK_BYTES = 1 << 26


class SafetensorsFile:
    """A file whose tensors are written in a declared order.

    Args:
        path: path of the file.
        tensors: names, shapes and dtypes, in order.
        metadata: text metadata of the header.
    """

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for name, shape, dtype in tensors:
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._expected = [(name, math.prod(shape), dtype) for name, shape, dtype in reversed(tensors)]
        self._stream: BinaryIO = path.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def add_tensor(self, name: str, view: Tensor) -> None:
        """Write the next tensor; ``view`` holds its elements in order, with any strides.

        Raises:
            ValueError: when another tensor was declared next.
        """
        expected = self._expected.pop()
        if expected != (name, view.numel(), view.dtype):
            raise ValueError(f"{name} with {view.numel()} elements of {view.dtype} was added instead of {expected}")
        rows = view.reshape(1) if view.dim() == 0 else view
        row_bytes = max(rows[:1].numel() * view.element_size(), 1)
        for block in rows.split(max(_BLOCK_BYTES // row_bytes, 1)):
            self._stream.write(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Close the file after syncing it to the disk.

        Raises:
            ValueError: when declared tensors are missing.
        """
        if self._expected:
            raise ValueError(f"{self._expected[-1][0]} was declared but not added")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
