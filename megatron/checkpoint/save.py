"""Atomic saving of checkpoints.

Every rank writes to a temporary folder, the ranks check that all writes have succeeded, and rank 0 renames the folder
and then updates the tracker. After an interruption, the tracker still names the previous checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megatron.base.errors import UserError
from megatron.checkpoint import files
from megatron.checkpoint.certificate import Statements
from megatron.checkpoint.logical import LogicalShard
from megatron.checkpoint.plain import encode_plain
from megatron.checkpoint.planner import ShardSavePlanner
from megatron.checkpoint.storage import ShardWriter, describe_error
from megatron.distributed.agreement import first_problem, rank_of, run_communication, size_of

COMMON, CONFIG = "common.json", "config.yaml"
Log = Callable[[str], None]


def silent(line: str) -> None:
    """Discard a log line."""


def ignore_single_process_warning() -> None:
    """Ignore torch's warning about saving or loading without a process group, which is intended here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def save_checkpoint(
    root: str | Path,
    iteration: int,
    tensors: Mapping[str, LogicalShard],
    common: Mapping[str, Any],
    config_yaml: str,
    group: dist.ProcessGroup | None = None,
    *,
    keep_last: int | None = None,
    last_update: int | None = None,
    log: Log = silent,
    statements: Statements | None = None,
) -> None:
    """Save ``root/iter_<iteration>`` and update the tracker. A collective call on the group.

    Args:
        root: folder of all checkpoints of a run, on a file system that all ranks share.
        iteration: training iteration.
        tensors: tensors of this rank, by global name. Together the ranks have every element of each tensor; replicated
            elements are written once.
        common: values of plain types and small tensors, the same on every rank; the values of rank 0 are saved.
        config_yaml: resolved configuration.
        group: a gloo group; None for this process only.
        keep_last: number of checkpoints to keep; older checkpoints are removed afterwards. None to keep all.
        last_update: iteration of the last applied update; the newest checkpoint before it is kept, too.
        log: prints progress lines, on rank 0.
        statements: the run's statements, the same on every rank, for a certificate; None for none.

    Raises:
        UserError: on every rank if any rank fails to write; the checkpoint's files are removed.
        CommunicationError: when a peer is gone.
    """
    root, is_first = Path(root), rank_of(group) == 0
    folder = files.temporary_folder(root, iteration)

    def raise_if_any_failed(problem: str | None) -> None:
        agreed = first_problem(group, problem)
        if agreed is not None:
            files.discard(root, iteration)
            raise UserError(
                f"the checkpoint of iteration {iteration} was not saved, earlier ones are untouched: {agreed}"
            )

    problem = None
    documents: dict[str, bytes] = {}
    try:
        documents = {COMMON: encode_plain(dict(common)), CONFIG: config_yaml.encode()}
    except TypeError as error:
        problem = str(error)  # raised below, together with the other ranks, which are about to communicate
    if is_first:
        log(f"saving checkpoint at iteration {iteration:7d} to {root}")
    if is_first and not problem:
        try:
            root.mkdir(parents=True, exist_ok=True)
            files.remove_leftovers(root)
            folder.mkdir()
        except OSError as error:
            problem = describe_error(error, Path(error.filename or root))
    raise_if_any_failed(problem)

    planner = ShardSavePlanner()
    writer = ShardWriter(folder, iteration, size_of(group), documents, statements)
    single_process = group is None
    if single_process:
        ignore_single_process_warning()
    run_communication(
        "saving a checkpoint",
        lambda: dcp.save(
            dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=single_process
        ),
    )
    problem = planner.problem or writer.problem
    raise_if_any_failed(problem and f"{problem} (rank {rank_of(group)})")

    problem = None
    if is_first:
        try:
            files.publish(root, iteration)
        except OSError as error:
            problem = describe_error(error, Path(error.filename or root))
    raise_if_any_failed(problem)
    if not is_first:
        return
    log(f"successfully saved checkpoint at iteration {iteration:7d} to {root}")
    if keep_last is None:
        return
    try:
        removed, prune_errors = files.prune(root, iteration, keep_last, last_update)
    except OSError as error:
        removed, prune_errors = [], [error]
    for removed_iteration in removed:
        log(f"removed checkpoint of iteration {removed_iteration} from {root}")
    for prune_error in prune_errors:
        log(f"could not remove an old checkpoint: {describe_error(prune_error, Path(prune_error.filename or root))}")
