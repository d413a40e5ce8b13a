"""The saves of a run, optionally in the background, with a single save pending at a time."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.certificate import Statements
from megatron.checkpoint.logical import LogicalShard, TensorBox
from megatron.checkpoint.plain import decode_plain, encode_plain
from megatron.checkpoint.save import Log, save_checkpoint, silent
from megatron.distributed.agreement import any_rank
from megatron.distributed.work import Caller

WRITE_TIMEOUT = timedelta(hours=1)
"""Time that ranks wait for a rank that is still writing."""


class CheckpointSaver:
    """Writer of a run's checkpoints, in the background with ``async_``; see ``save_checkpoint``.

    With ``async_`` and a group, the constructor creates a process group, so every process of the world must call it.
    All methods are called by every rank of the group, in the same order.
    """

    def __init__(
        self,
        root: str | Path,
        group: dist.ProcessGroup | None = None,
        *,
        async_: bool = False,
        keep_last: int | None = None,
        log: Log = silent,
    ) -> None:
        self.root = Path(root)
        self.keep_last = keep_last
        self.log = log
        self.async_ = async_
        self._group = self._write_group = group
        if async_ and group is not None:
            # A separate group: collectives of the training thread must not match those of the background thread.
            ranks = dist.get_process_group_ranks(group)
            self._write_group = dist.new_group(ranks, timeout=WRITE_TIMEOUT, backend="gloo")
        self._pending: Future[None] | None = None

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, LogicalShard],
        common: Mapping[str, Any],
        config_yaml: str,
        last_update: int | None = None,
        statements: Statements | None = None,
    ) -> None:
        """Wait for the previous save, then save or start a background save. See ``save_checkpoint``."""
        self.finish_save()
        if self.async_:  # training may change the tensors and the values while they are written
            copies = {}
            for name, shard in tensors.items():
                boxes = [TensorBox(box.offsets, box.tensor.detach().to("cpu", copy=True)) for box in shard.boxes]
                copies[name] = LogicalShard(shard.global_shape, shard.dtype, boxes)
            tensors = copies
            with suppress(TypeError):  # for values that cannot be saved, for which all ranks raise an error together
                common = decode_plain(encode_plain(dict(common)))
        save = partial(
            save_checkpoint,
            self.root,
            iteration,
            tensors,
            common,
            config_yaml,
            self._write_group,
            keep_last=self.keep_last,
            last_update=last_update,
            log=self.log,
            statements=statements,
        )
        if self.async_:
            # Its thread does not delay the exit of a process, which loses only the checkpoint that is being written.
            self._pending = Caller("checkpoint-save").start(save)
        else:
            save()

    def poll(self) -> None:
        """Raise the error of a background save once it has ended on every rank; called once per step.

        Ranks agree on whether it has ended, so that all raise at the same step. This costs nothing without a pending
        save.
        """
        if self._pending is not None and not any_rank(self._group, not self._pending.done()):
            self.finish_save()

    def finish_save(self) -> None:
        """Wait until no save is pending.

        Raises:
            UserError: when the pending save failed.
            CommunicationError: when a peer is gone.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
