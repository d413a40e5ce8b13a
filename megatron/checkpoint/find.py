"""The checkpoint to resume from, and alternatives to a checkpoint that cannot be loaded."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from megatron.base.errors import UserError
from megatron.checkpoint.files import (
    TRACKER,
    Iteration,
    checkpoint_folder,
    folder_name,
    parse_iteration,
    read_tracker_text,
    saved_iterations,
)
from megatron.checkpoint.manifest import MANIFEST, read_manifest
from megatron.checkpoint.save import COMMON, Log, silent
from megatron.checkpoint.storage import check_file_sizes

SHOWN_ITERATIONS = 4
_CONVERT = "tools/ckpt_convert.py --to megatron-cc"


def read_tracker(root: str | Path, log: Log = silent) -> Iteration | None:
    """Find the checkpoint to resume from: the tracker's, or the newest complete checkpoint if there is no tracker.

    Returns:
        An iteration, "release", or None when nothing has been saved below ``root``.

    Raises:
        UserError: when the tracker is unreadable or names a checkpoint that is not there, or there is no tracker and
            no checkpoint is complete.
    """
    root = Path(root)
    path = root / TRACKER
    try:
        text = read_tracker_text(root)
    except FileNotFoundError:  # or the tracker is a dead link
        saved: list[Iteration] = [*saved_iterations(root)]
        if checkpoint_folder(root, "release").is_dir():
            saved.append("release")
        newest_complete = next((iteration for iteration in saved if _looks_complete(root, iteration)), None)
        if newest_complete is not None:
            log(f"warning: {path} is missing; taking iteration {newest_complete}, the newest complete checkpoint there")
            return newest_complete
        if not saved:
            return None
        if (other := _find_other_format(checkpoint_folder(root, saved[0]))) is not None:
            raise UserError(f"{checkpoint_folder(root, saved[0])} {other}") from None
        names = ", ".join(folder_name(iteration) for iteration in saved[:SHOWN_ITERATIONS])
        raise UserError(
            f"{path} is missing and no checkpoint there is complete ({names}); name a folder that holds one"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{root} {describe_absence(root)}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    iteration = parse_iteration(text)
    if iteration is None:
        raise UserError(f"{path} holds {text[:30]!r} instead of an iteration or 'release'{fallback(root, None)}")
    folder = checkpoint_folder(root, iteration)
    if not folder.is_dir():
        raise UserError(f"{path} names iteration {iteration}, which is not there{fallback(root, iteration)}")
    if (other := _find_other_format(folder)) is not None:
        raise UserError(f"{folder} {other}")
    return iteration


def find_other_content(root: Path) -> str | None:
    """Describe a path without checkpoints, with advice; None if its kind is not known."""
    if root.is_file():
        return f"is a file; name the folder that --save wrote to ({_CONVERT} reads folders of other formats)"
    if (root / MANIFEST).is_file() and (root / COMMON).is_file():
        iteration = parse_iteration(root.name.removeprefix("iter_"))
        selected = f", {root.parent} (--ckpt-step {iteration} selects it)" if isinstance(iteration, int) else ""
        return f"is a single checkpoint; name the folder that holds it{selected}"
    return _find_other_format(root)


def _find_other_format(folder: Path) -> str | None:
    """Find the format of another program's checkpoint, as ``find_other_content``."""
    if (folder / ".metadata").is_file():
        return (
            "is a torch_dist checkpoint of Megatron-LM, which cannot be read here; export it there as a Hugging Face "
            f"model, and convert that with {_CONVERT}"
        )
    hf_files = ("model*.safetensors", "pytorch_model*.bin") if (folder / "config.json").is_file() else ()
    if any(path for pattern in hf_files for path in folder.glob(pattern)):
        name = "Hugging Face model"
    elif any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        name = "classic Megatron checkpoint"
    else:
        return None
    return f"is a {name}; convert it ({_CONVERT} --load {folder} --save FOLDER), and name that FOLDER"


def describe_absence(root: str | Path) -> str:
    """Describe a folder without checkpoints: a predicate with advice."""
    absent = "" if Path(root).exists() else " (there is no such folder)"
    return find_other_content(Path(root)) or f"holds no checkpoint{absent}; name the folder that --save wrote to"


def complete_iterations(root: str | Path) -> list[int]:
    """Iterations whose manifest is intact and whose files have their sizes, newest first."""
    return [iteration for iteration in saved_iterations(Path(root)) if _looks_complete(Path(root), iteration)]


def _looks_complete(root: Path, iteration: Iteration) -> bool:
    folder = checkpoint_folder(root, iteration)
    try:
        return check_file_sizes(folder, read_manifest(folder).files) is None
    except UserError:
        return False


def fallback(root: Path, broken: Iteration | None, flag: str | None = None) -> str:
    """End of an error message: a checkpoint to load instead, preferably an older one.

    Args:
        root: the folder of all checkpoints.
        broken: iteration of the checkpoint that cannot be loaded.
        flag: flag that named it, if any; in that case the tracker was not read, and may name an intact checkpoint.
    """
    other_iterations = [iteration for iteration in saved_iterations(root) if iteration != broken]
    try:
        tracked = parse_iteration(read_tracker_text(root))
    except OSError:
        tracked = None
    # A broken checkpoint that is not the tracker's was named explicitly.
    named = flag is not None or (broken is not None and tracked not in (None, broken))
    if isinstance(broken, int) and not named:
        other_iterations.sort(key=lambda iteration: (iteration > broken, -iteration))
    # Check no more than the message needs: every rank calls this, and a folder may hold hundreds of checkpoints.
    complete = (iteration for iteration in other_iterations if _looks_complete(root, iteration))
    first = next(complete, None)
    if first is None:
        return f"; {root} has no other complete checkpoint"
    if not named:
        return f"; iteration {first} is complete: to load it, write {first} into {root / TRACKER}"
    names = ", ".join(map(str, [first, *islice(complete, SHOWN_ITERATIONS - 1)]))
    if next(complete, None) is not None:
        names += ", ..."
    example = f" ({flag} {first})" if flag else ""
    return f"; complete checkpoints, newest first: {names}; name one of them{example}"
