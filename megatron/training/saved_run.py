"""The checkpoint of ``--load``, and whether it suits a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.base.stateful import migrate_saved_values
from megatron.base.user_text import Note
from megatron.checkpoint.files import Iteration, checkpoint_folder, parse_iteration
from megatron.checkpoint.find import describe_absence, find_other_content, read_tracker
from megatron.checkpoint.load import load_common, saved_kind, saved_sections, saved_shapes
from megatron.checkpoint.model_state import MODEL, has_experts
from megatron.checkpoint.save import COMMON
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.islands import IslandsConfig, island_folder
from megatron.config.model_types import check_model_type
from megatron.config.run import RunConfig
from megatron.distributed.agreement import gather_texts, run_together
from megatron.distributed.topology import Topology
from megatron.training.progress_state import Progress, check_saved_values


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint that a run starts from, with its values other than tensors.

    Args:
        iteration: iteration of the checkpoint.
        common: values of the checkpoint other than tensors.
        progress: position of the run; zero with ``--finetune``.
    """

    iteration: Iteration
    common: Mapping[str, Any]
    progress: Progress


def with_pretrained(config: RunConfig, note: Note) -> RunConfig:
    """Load ``--pretrained-checkpoint``, as with ``--finetune``, if the folder of ``--load`` holds no checkpoint yet,
    neither of this run nor of islands. Returns the configuration.

    Raises:
        UserError: when the pretrained checkpoint does not exist.
    """
    checkpoint, folder = config.checkpoint, config.checkpoint.pretrained_checkpoint
    if folder is None or checkpoint.ckpt_step is not None or _holds_any(checkpoint.load, config.islands):
        return config
    if not _holds_any(folder, config.islands):
        absence = (
            "holds no checkpoint; name the folder that --save, or tools/ckpt_convert.py --to megatron-cc, wrote to"
        )
        raise UserError(f"--pretrained-checkpoint {folder} {find_other_content(Path(folder)) or absence}")
    note(f"no checkpoint in --load yet: beginning with the weights of --pretrained-checkpoint {folder}")
    return replace(config, checkpoint=replace(checkpoint, load=folder, finetune=True))


def _holds_any(root: str | None, islands: IslandsConfig) -> bool:
    folders = (
        [] if root is None else [root, *(island_folder(root, n) for n in range(islands.islands) if islands.several)]
    )
    return any(read_tracker(folder) is not None for folder in folders)


def find_saved(config: CheckpointConfig, topology: Topology, log: Callable[[str], None]) -> SavedRun | None:
    """Find the checkpoint of ``--load``; None if there is none and the run starts afresh. A collective call.

    Args:
        config: flags that name the checkpoint.
        topology: the ranks.
        log: prints lines for the user, on rank 0.

    Raises:
        UserError: on every rank, when no checkpoint can be used.
    """
    root, group = config.load, topology.control.pg
    if root is None:
        return None
    iteration: Iteration | None = config.ckpt_step
    if iteration is None:
        # Use rank 0's result, since file systems may show the ranks different things.
        tracker_value = run_together(group, lambda: _read_tracker(config, log) if topology.rank == 0 else None)
        iteration = parse_iteration(gather_texts(group, "" if tracker_value is None else str(tracker_value))[0])
    if iteration is None:
        if config.exit_on_missing_checkpoint or config.finetune:
            raise UserError(f"{config.source} {describe_absence(root)}")
        return None
    flag = None if config.ckpt_step is None else "--ckpt-step"
    common = run_together(group, lambda: migrate_saved_values(load_common(root, iteration, flag)))
    common_file = checkpoint_folder(Path(root), iteration) / COMMON
    needed_state = {"optimizer": not config.loads_weights_only, "counters": not config.finetune}
    run_together(group, lambda: check_saved_values(common, common_file, **needed_state))
    progress = Progress()
    if not config.finetune:
        progress.load_state_dict(common["progress"])
    return SavedRun(iteration, common, progress)


def _read_tracker(config: CheckpointConfig, log: Callable[[str], None]) -> Iteration | None:
    """Find the newest checkpoint of ``--load``; None if the folder is new.

    Raises:
        UserError: when it cannot be used, or the folder holds something else to start from.
    """
    assert config.load is not None
    iteration = read_tracker(config.load, log)
    if iteration is None and (other := find_other_content(Path(config.load))) is not None:
        raise UserError(f"{config.source} {other}")
    return iteration


def check_saved_model_type(config: CheckpointConfig, saved: SavedRun, kind: str, topology: Topology) -> None:
    """Check that a checkpoint's model is of the run's kind. A collective call.

    Raises:
        UserError: on every rank, when it is of another kind.
    """
    root = config.load
    assert root is not None
    saved_model_kind = run_together(topology.control.pg, lambda: saved_kind(root, saved.iteration))
    check_model_type(config.source, saved_model_kind, kind)


def check_optimizer(root: str, iteration: Iteration, config: RunConfig, group: dist.ProcessGroup | None) -> None:
    """Check that a checkpoint is of the run's optimizer: Adam's moments have LAMB's names and shapes, too.

    A collective call.

    Raises:
        UserError: on every rank, when it is of another optimizer, or is damaged.
    """
    configured = config.optimizer.optimizer
    sections = run_together(group, lambda: saved_sections(root, iteration))
    saved = sections.get("optimizer", {}).get("optimizer", configured)
    if saved != configured:
        raise UserError(
            f"--load {root} has the state of another optimizer; give --optimizer {saved} instead of {configured}, or "
            "--no-load-optim to begin with new moments"
        )


def check_dense(root: str, iteration: Iteration, group: dist.ProcessGroup | None) -> None:
    """Check that a checkpoint is of a dense model. A collective call.

    Raises:
        UserError: on every rank, when it has experts, or is damaged.
    """
    if has_experts(run_together(group, lambda: saved_shapes(root, iteration, MODEL))):
        raise UserError(
            f"--moe-use-upcycling: --load {root} holds a model that has experts already; leave the flag out"
        )
