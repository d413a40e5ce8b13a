"""Files of ``torch.save``, read by torch's weights-only loader and checked against their own checksums."""

from __future__ import annotations

import re
import sys
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.storage import tensor_bytes


class TorchFile:
    """A file of ``torch.save``. Its content is read at once; its tensors stay memory-mapped until they are used.

    The tensors of a file from before torch 1.6, which is not an archive, are in memory.

    Args:
        path: path of the file.
        allowed: further globals that it may use, beside tensors and containers (``torch.serialization.safe_globals``).

    Raises:
        UserError: when it is damaged, or the weights-only loader refuses it.
    """

    def __init__(self, path: Path, allowed: Sequence[Any] = ()) -> None:
        self.path = path
        self._records: frozenset[tuple[int, int]] | None = None
        self._verified: set[int] = set()
        try:
            is_archive = zipfile.is_zipfile(path)
            if is_archive:
                self._records = _storage_checksums(path)
            with torch.serialization.safe_globals(list(allowed)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.content: Any = torch.load(
                    path, map_location=lambda storage, _: storage, weights_only=True, mmap=is_archive
                )
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from error
        except Exception as error:  # torch raises many types, whose messages advise to load the file unsafely
            named = re.search(r"GLOBAL (\S+)", str(error))
            reason = (
                f"it names {named[1]}, and only tensors and plain values are read; fetch a file that holds nothing else"
                if named
                else "it is damaged, or holds more than tensors and plain values; fetch it again"
            )
            raise UserError(f"{path}: cannot be read safely: {reason}") from error

    def stored(self, name: str, like: Tensor) -> StoredTensor:
        """Entry of a tensor of this file.

        Raises:
            UserError: when it is not a dense tensor with data.
        """
        unsupported = {
            "sparse": like.layout != torch.strided,
            "nested": like.is_nested,
            "quantized": like.is_quantized,
            "without contents": like.device.type != "cpu",
        }
        for kind, applies in unsupported.items():
            if applies:
                raise UserError(f"{self.path}: {name} is a tensor that is {kind}; only dense ones can be converted")
        return StoredTensor(self, name, like.detach())

    def verify_checksum(self, name: str, like: Tensor) -> None:
        """Check the storage of a tensor against the archive's checksums, once.

        Raises:
            UserError: when no record of the archive has its size and checksum.
        """
        storage = like.untyped_storage()
        if self._records is None or not storage.nbytes() or storage.data_ptr() in self._verified:
            return
        data = tensor_bytes(torch.empty(0, dtype=torch.uint8).set_(storage))
        if (len(data), zlib.crc32(data)) not in self._records:
            raise UserError(f"{self.path}: {name} is damaged: its checksum does not match; fetch the file again")
        self._verified.add(storage.data_ptr())


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a ``torch.save`` file.

    Args:
        file: the file.
        name: name of the tensor, for messages.
        like: the tensor, a view of the file's memory.
    """

    file: TorchFile
    name: str
    like: Tensor

    def read(self) -> Tensor:
        """Return the tensor, checked and contiguous.

        Raises:
            UserError: when it is damaged.
        """
        self.file.verify_checksum(self.name, self.like)
        return self.like.resolve_neg().contiguous()


def _storage_checksums(path: Path) -> frozenset[tuple[int, int]] | None:
    """Sizes and checksums of an archive's storages; None if it was written without checksums.

    Raises:
        UserError: when the archive has another byte order.
        zipfile.BadZipFile: when a record other than the storages is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise zipfile.BadZipFile("torch compresses nothing")
        checked = any(info.CRC for info in infos)
        for info in infos:
            if checked and "/data/" not in info.filename:
                archive.read(info)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    order = reader.get_record("byteorder") if reader.has_record("byteorder") else b""
    if order in (b"little", b"big") and order != sys.byteorder.encode():
        raise UserError(f"{path}: its numbers are {order.decode()}-endian; save it again on a machine like this one")
    if not checked:
        return None
    return frozenset((info.file_size, info.CRC) for info in infos if "/data/" in info.filename)
