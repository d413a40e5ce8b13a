"""Atomic saving of checkpoints.

Every rank writes to a temporary folder, the ranks check that all writes have succeeded, and rank 0 renames the folder
and then updates the tracker. After an interruption, the tracker still names the previous checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megatron.base.errors import UserError
from megatron.checkpoint import files
from megatron.checkpoint.certificate import Statements
from megatron.checkpoint.logical import LogicalShard, TensorBox
from megatron.checkpoint.plain import encode_plain
from megatron.checkpoint.planner import ShardSavePlanner
from megatron.checkpoint.storage import ShardWriter, describe_error
from megatron.distributed.agreement import first_problem, rank_of, run_communication, size_of
from megatron.distributed.work import Caller

COMMON, CONFIG = "common.json", "config.yaml"
Log = Callable[[str], None]


def silent(line: str) -> None:
    """Discard a log line."""


def ignore_single_process_warning() -> None:
    """Ignore torch's warning about saving or loading without a process group, which is intended here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@dataclass
class _SaveJob:
    """The arguments of a save."""

    root: Path
    iteration: int
    tensors: dict[str, LogicalShard]
    documents: dict[str, bytes]
    problem: str | None
    group: dist.ProcessGroup | None
    keep_last: int | None
    last_update: int | None
    log: Log
    statements: Statements | None

    @property
    def folder(self) -> Path:
        return files.temporary_folder(self.root, self.iteration)

    def run(self) -> None:
        is_first = rank_of(self.group) == 0
        if is_first:
            self.log(f"saving checkpoint at iteration {self.iteration:7d} to {self.root}")
        self._raise_if_any_failed(self.problem or self._run_on_rank_0(self._make_folder))
        self._raise_if_any_failed(self._write())
        self._raise_if_any_failed(self._run_on_rank_0(lambda: files.publish(self.root, self.iteration)))
        if is_first:
            self.log(f"successfully saved checkpoint at iteration {self.iteration:7d} to {self.root}")
            if self.keep_last is None:
                return
            try:
                removed, problems = files.prune(self.root, self.iteration, self.keep_last, self.last_update)
            except OSError as error:
                removed, problems = [], [error]
            for iteration in removed:
                self.log(f"removed checkpoint of iteration {iteration} from {self.root}")
            for problem in problems:
                path = Path(problem.filename or self.root)
                self.log(f"could not remove an old checkpoint: {describe_error(problem, path)}")

    def _run_on_rank_0(self, step: Callable[[], None]) -> str | None:
        """Run a step on rank 0; return its error message, if any."""
        if rank_of(self.group) == 0:
            try:
                step()
            except OSError as error:
                return describe_error(error, Path(error.filename or self.root))
        return None

    def _make_folder(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(self.root)
        self.folder.mkdir()

    def _write(self) -> str | None:
        """Write all files to the temporary folder; return this rank's error message, if any."""
        planner = ShardSavePlanner()
        writer = ShardWriter(self.folder, self.iteration, size_of(self.group), self.documents, self.statements)
        single_process = self.group is None
        if single_process:
            ignore_single_process_warning()
        run_communication(
            "saving a checkpoint",
            lambda: dcp.save(
                dict(self.tensors),
                storage_writer=writer,
                planner=planner,
                process_group=self.group,
                no_dist=single_process,
            ),
        )
        problem = planner.problem or writer.problem
        return problem and f"{problem} (rank {rank_of(self.group)})"

    def _raise_if_any_failed(self, problem: str | None) -> None:
        """Remove all written files and raise an error on every rank, if any rank has a problem."""
        agreed = first_problem(self.group, problem)
        if agreed is not None:
            files.discard(self.root, self.iteration)
            raise UserError(
                f"the checkpoint of iteration {self.iteration} was not saved, earlier ones are untouched: {agreed}"
            )


def save_checkpoint(
    root: str | Path,
    iteration: int,
    tensors: Mapping[str, LogicalShard],
    common: Mapping[str, Any],
    config_yaml: str,
    group: dist.ProcessGroup | None = None,
    async_: bool = False,
    *,
    keep_last: int | None = None,
    last_update: int | None = None,
    log: Log = silent,
    statements: Statements | None = None,
) -> Future[None] | None:
    """Save ``root/iter_<iteration>`` and update the tracker. A collective call on the group.

    Args:
        root: folder of all checkpoints of a run, on a file system that all ranks share.
        iteration: training iteration.
        tensors: tensors of this rank, by global name. Together the ranks have every element of each tensor; replicated
            elements are written once.
        common: values of plain types and small tensors, the same on every rank; the values of rank 0 are saved.
        config_yaml: resolved configuration.
        group: a gloo group; None for this process only. With ``async_``, nothing else may use the group until the save
            has completed.
        async_: whether to copy the tensors, return, and write in the background.
        keep_last: number of checkpoints to keep; older checkpoints are removed afterwards. None to keep all.
        last_update: iteration of the last applied update; the newest checkpoint before it is kept, too.
        log: prints progress lines, on rank 0.
        statements: the run's statements, the same on every rank, for a certificate; None for none.

    Returns:
        The pending save with ``async_``, else None.

    Raises:
        UserError: on every rank if any rank fails to write; the checkpoint's files are removed.
        CommunicationError: when a peer is gone.
    """
    problem = None
    documents: dict[str, bytes] = {}
    try:
        documents = {COMMON: encode_plain(dict(common)), CONFIG: config_yaml.encode()}
    except TypeError as error:
        problem = str(error)  # raised below, together with the other ranks, which are about to communicate
    tensors_to_save = dict(tensors)
    if async_:  # training may change the tensors while they are written
        for name, shard in tensors.items():
            boxes = [TensorBox(box.offsets, box.tensor.detach().to("cpu", copy=True)) for box in shard.boxes]
            tensors_to_save[name] = LogicalShard(shard.global_shape, shard.dtype, boxes)
    job = _SaveJob(
        Path(root), iteration, tensors_to_save, documents, problem, group, keep_last, last_update, log, statements
    )
    if async_:
        # Its thread does not delay the exit of a process, which loses only the checkpoint that is being written.
        return Caller("checkpoint-save").start(job.run)
    job.run()
    return None
