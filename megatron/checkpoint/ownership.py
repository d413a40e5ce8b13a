"""Ownership of a run's save folder: writable, locked, and free of another run's checkpoints."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER, checkpoint_folder, saved_iterations
from megatron.checkpoint.folder_lock import LOCK, FolderLock
from megatron.config.checkpoint import CheckpointConfig


@contextmanager
def owned_save_folder(config: CheckpointConfig, log: Callable[[str], None]) -> Iterator[FolderLock | None]:
    """Create and lock the folder of ``--save`` for the duration of a run.

    Raises:
        UserError: when it cannot be written to, another run holds it, or it has checkpoints that this run does not
            continue from.
    """
    if config.save is None:
        yield None
        return
    is_new = not os.path.lexists(config.save)
    try:
        Path(config.save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.save):
            pass
        lock = FolderLock(config.save, log)
    except OSError as error:
        raise UserError(
            f"--save {config.save}: cannot write there ({error.strerror}); name a folder that can be written to"
        ) from error
    try:
        _check_free_to_save(config)
        yield lock
    finally:
        lock.release()
        with suppress(OSError):
            if is_new and os.listdir(config.save) == [LOCK]:  # the run was refused before it saved anything
                lock.path.unlink()
                os.rmdir(config.save)


def _check_free_to_save(config: CheckpointConfig) -> None:
    """Check that a run replaces only its own earlier checkpoints; else raise UserError, naming the flags to give."""
    if config.overwrite_checkpoints or (config.saves_where_it_loads and not config.finetune):
        return
    assert config.save is not None
    root = Path(config.save)
    saved, release = saved_iterations(root), checkpoint_folder(root, "release")
    if saved:
        newest = f"iteration {saved[0]}"
    elif release.is_dir():
        newest = release.name
    elif os.path.lexists(root / TRACKER):
        newest = TRACKER
    else:
        return
    resume = f"--load {config.save} goes on from them"
    if config.saves_where_it_loads:
        resume = "leave --finetune out to go on from them"
    raise UserError(
        f"--save {config.save} holds checkpoints of another run ({newest}): {resume}, --overwrite-checkpoints replaces "
        "them, or name another folder"
    )
