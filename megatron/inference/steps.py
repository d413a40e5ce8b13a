"""Decoding steps in fixed memory; on CUDA they are captured as CUDA graphs, per shape, and replayed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.base.errors import first_line
from megatron.models.kv_cache import KVCache

BLOCK = 256
"""Granularity in positions of the shapes of recorded steps, so that few shapes are recorded."""


class Recording(NamedTuple):
    """A recorded computation; ``replay`` recomputes ``result`` in the same memory."""

    replay: Callable[[], None]
    result: Tensor


Record = Callable[[Callable[[], Tensor]], Recording]
"""Records a computation by calling it once; the result is not computed until replay."""


def record_on_cuda(compute: Callable[[], Tensor]) -> Recording:
    """Record the kernel launches of a computation as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device concurrently
        result = compute()
    return Recording(graph.replay, result)


@dataclass
class Workspace:
    """A KV cache, the newest tokens of its rows, and recordings of decoding steps.

    Args:
        cache: keys and values.
        workspaces: owner of the recorder; without a recorder every step runs eagerly.
    """

    cache: KVCache
    workspaces: Workspaces

    def __post_init__(self) -> None:
        self.tokens_b1 = torch.zeros((self.cache.rows, 1), dtype=torch.int64, device=self.cache.positions_b1.device)
        self._seen_shapes: set[Hashable] = set()
        self._recordings: dict[Hashable, Recording] = {}

    def shrink(self, rows: Sequence[int]) -> None:
        """Drop all rows except ``rows``, and the recordings, whose memory is freed."""
        self.cache.keep_rows(rows)
        self.__post_init__()

    def step(self, tokens: Sequence[int], compute: Callable[[], Tensor]) -> Tensor:
        """Compute the next position of each row from its newest token; the next step may overwrite the result.

        The first step of a shape runs eagerly: it loads kernels, which is not allowed during capture, and short texts
        never need the recording. The second step is recorded.

        Args:
            tokens: newest token of each row.
            compute: computation that reads ``tokens_b1`` and the cache.
        """
        self.tokens_b1.copy_(torch.tensor([[token] for token in tokens]))
        record, shape = self.workspaces.record, self.cache.shape
        if record is not None and shape in self._seen_shapes and shape not in self._recordings:
            try:
                self._recordings[shape] = record(compute)
            except RuntimeError as error:
                # Nothing was computed yet: eager execution is correct, only slower.
                reason = first_line(error)
                sys.stderr.write(f"note: tokens are generated without CUDA graphs, slower: {reason}\n")
                self.workspaces.record = None
        self._seen_shapes.add(shape)
        if self.workspaces.record is not None and shape in self._recordings:
            recording = self._recordings[shape]
            recording.replay()
            result = recording.result
        else:
            result = compute()
        self.cache.advance()
        return result


@dataclass(eq=False)
class Workspaces:
    """Factory of workspaces; with a recorder, the last workspace is kept to reuse its recordings.

    Args:
        record: the recorder; None if steps cannot be recorded, or a recording has failed.
    """

    record: Record | None = None
    _last_workspace: Workspace | None = None

    @property
    def block(self) -> int:
        """Granularity in positions of a step's shape."""
        return 1 if self.record is None else BLOCK

    def workspace(self, rows: int, positions: int, make: Callable[[int], KVCache]) -> Workspace:
        """Return a workspace; the workspace of the previous call must not be used any more.

        Args:
            rows: number of rows.
            positions: maximum number of positions of a row.
            make: creates a cache with the given number of positions.
        """
        workspace = self._last_workspace
        if workspace is not None and workspace.cache.rows == rows and workspace.cache.capacity >= positions:
            workspace.cache.clear()
            return workspace
        self._last_workspace = None  # free its memory before allocating the next workspace
        new_workspace = Workspace(make(-(-positions // self.block) * self.block), self)
        if self.record is not None:
            self._last_workspace = new_workspace
        return new_workspace


def rows_to_keep(rows: Sequence[int], active_rows: Collection[int], recorded: bool) -> list[int] | None:
    """Indices of the rows to keep in memory after others have ended; None to keep all.

    If steps are recorded, ended rows are still computed until they are half of all rows: fewer rows need a new
    recording and are no faster.
    """
    if len(active_rows) == len(rows) or (recorded and 2 * len(active_rows) > len(rows)):
        return None
    return [index for index, number in enumerate(rows) if number in active_rows]
