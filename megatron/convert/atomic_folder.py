"""Atomic output folder of a conversion: complete or absent, whatever stops the tool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.base.atomic import fsync_directory, hold_lock, remove_leftovers, temporary_path
from megatron.base.errors import UserError


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make a folder to write to, which replaces ``folder`` if the block succeeds and is removed otherwise.

    Args:
        folder: an empty folder, or a path that does not exist.

    Raises:
        UserError: when ``folder`` is neither, or cannot be written.
    """
    target = folder.resolve()
    partial = temporary_path(target, "partial")
    try:
        if os.path.lexists(folder):
            if not folder.is_dir():
                raise UserError(f"--save {folder}: is not a folder; name one that is empty or does not exist")
            if any(folder.iterdir()):
                raise UserError(f"--save {folder}: is not empty; name another folder")
            if folder.is_mount():
                raise UserError(f"--save {folder}: is a mount point, which cannot be replaced; name a folder in it")
        remove_leftovers(target, "partial", shutil.rmtree)
        partial.mkdir(parents=True)
        try:
            with hold_lock(partial, if_supported=True):
                yield partial
                partial.rename(target)  # replaces an empty folder
            fsync_directory(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        path = str(error.filename or target)
        location = f"--save {folder}" if path.startswith((str(target), str(partial))) else path
        raise UserError(f"{location}: {error.strerror or error}") from error
    except UserError as error:
        raise UserError(str(error).replace(str(partial), str(folder))) from error
