"""Single whole tensors of a checkpoint of any layout, read on demand."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.files import Iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.storage import read_into, tensor_bytes


class StoredTensors:
    """The tensors of a checkpoint, read on demand and checked against their checksums.

    Raises:
        UserError: when the checkpoint is missing or its table of contents damaged.
    """

    def __init__(self, root: str | Path, iteration: Iteration) -> None:
        self.folder, self.manifest = open_checkpoint(Path(root), iteration)

    def read(self, name: str) -> Tensor:
        """Read a whole tensor into new memory, with at most a single stored box in addition.

        Raises:
            UserError: when the tensor's bytes are missing or damaged.
            KeyError: when there is no tensor of this name.
        """
        stored = self.manifest.tensors[name]
        tensor = torch.empty(tuple(stored.size), dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            item = self.manifest.items[name, tuple(chunk.offsets)]
            sizes = tuple(chunk.sizes)
            is_only = math.prod(sizes) == tensor.numel()
            chunk_tensor = tensor if is_only else torch.empty(sizes, dtype=tensor.dtype)
            if chunk_tensor.numel() and not read_into(self.folder, item, tensor_bytes(chunk_tensor)):
                raise UserError(
                    f"{self.folder / item.file} is missing, truncated or damaged: {item.length} bytes from "
                    f"{item.offset}, a part of {name}, do not match their checksum"
                )
            if not is_only:
                box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, sizes, strict=True))
                tensor[box] = chunk_tensor
        return tensor
