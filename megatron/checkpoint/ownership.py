"""The folder that a run saves to: writable, locked, and without checkpoints of another run."""

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
    """Creates and locks the folder of ``--save`` for a run that is about to write to it.

    Args:
        config: flags of loading and saving.
        log: prints lines for the user.

    Raises:
        UserError: when it cannot be written to, another run holds it, or it has checkpoints that this run does not go
            on from.
    """
    if config.save is None:
        yield None
        return
    new = not os.path.lexists(config.save)
    lock = _lock(config.save, log)
    try:
        check_replaces_nothing(config)
        yield lock
    finally:
        lock.release()
        with suppress(OSError):
            if new and os.listdir(config.save) == [LOCK]:  # refused before it saved anything
                lock.path.unlink()
                os.rmdir(config.save)


def _lock(save: str, log: Callable[[str], None]) -> FolderLock:
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save):
            pass
        return FolderLock(save, log)
    except OSError as error:
        raise UserError(
            f"--save {save}: cannot write there ({error.strerror}); name a folder that can be written to"
        ) from error


def check_replaces_nothing(config: CheckpointConfig) -> None:
    """Checks that what a run saves replaces nothing but its own earlier checkpoints.

    Raises:
        UserError: when it would; the message names the flag that continues from them and the one that replaces them.
    """
    assert config.save is not None
    found = _held(Path(config.save))
    if found is None or config.overwrite_checkpoints:
        return
    if config.saves_where_it_loads:
        if not config.finetune:
            return
        resume = "leave --finetune out to go on from them"
    else:
        resume = f"--load {config.save} goes on from them"
    raise UserError(
        f"--save {config.save} holds checkpoints of another run ({found}): {resume}, --overwrite-checkpoints replaces "
        "them, or name another folder"
    )


def _held(root: Path) -> str | None:
    """Names the newest checkpoint in a folder, complete or not; None when there is none."""
    saved = saved_iterations(root)
    if saved:
        return f"iteration {saved[0]}"
    release = checkpoint_folder(root, "release")
    return release.name if release.is_dir() else TRACKER if os.path.lexists(root / TRACKER) else None
