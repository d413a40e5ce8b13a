"""Folders and small files of a checkpoint root, changed so that a kill at any instant loses nothing.

A checkpoint is written into ``.tmp_<name>`` and renamed. A checkpoint that is being replaced is first renamed to
``.old_<name>``, which counts as the checkpoint until its successor is in place.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron.base.atomic import fsync_directory
from megatron.base.regular import read_regular

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY, REPLACED = ".tmp_", ".old_"
REMOVED = TEMPORARY + "removed_"
CHECKPOINT = r"iter_\d{7,}|release"

Iteration = int | Literal["release"]


def folder_name(iteration: Iteration) -> str:
    """Name of an iteration's folder: ``iter_0000100`` or ``release``."""
    return iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"


def read_tracker_text(root: Path) -> str:
    """Read the beginning of the tracker, as text.

    Raises:
        OSError: when it cannot be read.
    """
    return read_regular(root / TRACKER, 100).decode(errors="replace").strip()


def parse_iteration(text: str) -> Iteration | None:
    """Parse the text of a tracker; None if it names no iteration."""
    if text == "release":
        return "release"
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def checkpoint_folder(root: Path, iteration: Iteration) -> Path:
    """Folder of a checkpoint."""
    final = root / folder_name(iteration)
    replaced = root / (REPLACED + final.name)
    return replaced if not final.exists() and replaced.exists() else final


def temporary_folder(root: Path, iteration: Iteration) -> Path:
    """Folder of a checkpoint that is being written."""
    return root / (TEMPORARY + folder_name(iteration))


def saved_iterations(root: Path) -> list[int]:
    """Iterations that have a folder, newest first."""
    if not root.is_dir():
        return []
    pattern = re.compile(rf"(?:{re.escape(REPLACED)})?iter_(\d{{7,}})")
    names = (pattern.fullmatch(name) for name in os.listdir(root))
    return sorted({int(match[1]) for match in names if match}, reverse=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def remove_leftovers(root: Path) -> None:
    """Remove leftovers of an interrupted save, and restore a checkpoint that was being replaced.

    Leftovers that cannot be removed stay: the next save checks that the paths it writes to are free.
    """
    for name in os.listdir(root):
        path = root / name
        with contextlib.suppress(OSError):
            if re.fullmatch(rf"{re.escape(REPLACED)}({CHECKPOINT})", name):
                final = root / name.removeprefix(REPLACED)
                if final.exists():
                    _remove_folder(path)
                else:
                    os.rename(path, final)
            elif name.startswith(REMOVED) or re.fullmatch(rf"{re.escape(TEMPORARY)}({CHECKPOINT})", name):
                _remove(path)
            elif name == TEMPORARY + TRACKER:
                path.unlink()


def publish(root: Path, iteration: Iteration) -> None:
    """Turn the complete temporary folder into the checkpoint that the tracker names.

    The tracker's new text is on the disk before anything is renamed, so that a full disk leaves everything
    unchanged.
    """
    final, replaced = root / folder_name(iteration), root / (REPLACED + folder_name(iteration))
    tracker = root / (TEMPORARY + TRACKER)
    write_synced(tracker, f"{iteration}\n".encode())
    replaces = final.exists()
    if replaces:
        os.rename(final, replaced)
    try:
        os.rename(temporary_folder(root, iteration), final)
    except OSError:
        if replaces:
            os.rename(replaced, final)
        raise
    fsync_directory(root)
    os.rename(tracker, root / TRACKER)
    fsync_directory(root)
    if replaces:
        with contextlib.suppress(OSError):  # the next save tries again
            _remove_folder(replaced)


def prune(root: Path, newest: int, keep_last: int, last_update: int | None = None) -> tuple[list[int], list[OSError]]:
    """Remove all but the last ``keep_last`` checkpoints up to ``newest``, which the tracker names.

    The newest checkpoint before ``last_update`` stays, too: training certainly continued from it, unlike from later
    checkpoints. Iterations after ``newest`` belong to an earlier run that went further, and are not removed.

    Args:
        root: the folder of all checkpoints.
        newest, keep_last: the newest checkpoint, and the number to keep.
        last_update: iteration of the last applied update; None to ignore updates.

    Returns:
        The iterations removed, and the errors of failed removals.
    """
    removed, problems = [], []
    iterations = [iteration for iteration in saved_iterations(root) if iteration <= newest]
    trusted = newest_before(iterations, last_update)
    for iteration in iterations[max(1, keep_last) :]:
        if iteration == trusted:
            continue
        try:
            _remove_folder(checkpoint_folder(root, iteration))
            removed.append(iteration)
        except OSError as error:
            problems.append(error)
    return removed, problems


def newest_before(iterations: Sequence[int], last_update: int | None) -> int | None:
    """The first iteration before the last applied update, in a list sorted newest first; None if there is none."""
    return next((iteration for iteration in iterations if last_update is not None and iteration < last_update), None)


def discard(root: Path, iteration: Iteration) -> None:
    """Remove the files of a failed save; never raise."""
    with contextlib.suppress(OSError):
        _remove(temporary_folder(root, iteration))
    with contextlib.suppress(OSError):
        (root / (TEMPORARY + TRACKER)).unlink()


def _remove_folder(folder: Path) -> None:
    """Remove a checkpoint under another name, so that an interrupted removal leaves no partial checkpoint."""
    doomed = folder.with_name(REMOVED + folder.name)
    with contextlib.suppress(FileNotFoundError):  # leftovers of an interrupted removal
        _remove(doomed)
    os.rename(folder, doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link, but not its target."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
