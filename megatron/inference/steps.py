"""Steps of generation in fixed memory: on CUDA each is recorded once for its shape, and then replayed by one launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.base.errors import first_line
from megatron.model.kv_cache import KVCache

BLOCK = 256
"""Positions by which the shape of a recorded step grows: fewer are recorded than there are tokens."""


class Recording(NamedTuple):
    """A recorded computation: ``replay`` computes ``result`` anew, in the same memory."""

    replay: Callable[[], None]
    result: Tensor


Record = Callable[[Callable[[], Tensor]], Recording]
"""Records a computation, which it calls once; nothing is computed before it is replayed."""


def record_on_cuda(compute: Callable[[], Tensor]) -> Recording:
    """Records what a computation launches as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device
        result = compute()
    return Recording(graph.replay, result)


class Replayer:
    """Computes steps by their recordings, where there is a recorder.

    The first step of a shape is computed as it is: it loads kernels, which a recording cannot do, and a text that ends
    there has no use for one. The second one is recorded.

    Args:
        workspaces: has the recorder, for as long as it can record; without one everything is computed as it is.
    """

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces = workspaces
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, Recording] = {}

    def compute(self, shape: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """The step's result, which the next step of this shape overwrites.

        Args:
            shape: key of all that the step's launches depend on.
            step: computes it.
        """
        if self._workspaces.record is None or shape not in self._seen:
            self._seen.add(shape)
            return step()
        if shape not in self._recordings:
            made = self._workspaces.recording(step)
            if made is None:
                return step()
            self._recordings[shape] = made
        recording = self._recordings[shape]
        recording.replay()
        return recording.result

    def forget(self) -> None:
        """Drops the recordings: the memory that they use is gone."""
        self._seen.clear()
        self._recordings.clear()


@dataclass
class Workspace:
    """A cache, the newest tokens of its rows, and the recordings of steps on them.

    Args:
        cache: keys and values.
        replayer: computes the steps.
    """

    cache: KVCache
    replayer: Replayer

    def __post_init__(self) -> None:
        self.tokens_b1 = torch.zeros((self.cache.rows, 1), dtype=torch.int64, device=self.cache.positions_b1.device)

    def shrink(self, rows: Sequence[int]) -> None:
        """Drops all rows but these."""
        self.cache.keep(rows)
        self.replayer.forget()
        self.__post_init__()

    def step(self, tokens: Sequence[int], compute: Callable[[], Tensor]) -> Tensor:
        """Computes the next position of each row from its newest token.

        Args:
            tokens: of each row.
            compute: the computation, of ``tokens_b1`` and the cache.
        """
        self.tokens_b1.copy_(torch.tensor([[token] for token in tokens]))
        result = self.replayer.compute(self.cache.shape, compute)
        self.cache.advance()
        return result


class Workspaces:
    """Makes workspaces; with a recorder it keeps the last one, whose recordings serve the next texts as well.

    Args:
        record: the recorder; None where steps cannot be recorded.
    """

    def __init__(self, record: Record | None = None) -> None:
        self.record = record
        self._kept: Workspace | None = None

    @property
    def block(self) -> int:
        """Positions by which a step's shape grows."""
        return 1 if self.record is None else BLOCK

    def recording(self, compute: Callable[[], Tensor]) -> Recording | None:
        """Records a computation; None, now and from then on, if it cannot be recorded, which is told."""
        assert self.record is not None
        try:
            return self.record(compute)
        except RuntimeError as error:
            # Nothing was computed yet, so nothing is lost but speed.
            reason = first_line(error)
            sys.stderr.write(f"note: tokens are generated without CUDA graphs, slower: {reason}\n")
            self.record = None
            return None

    def take(self, rows: int, positions: int, make: Callable[[int], KVCache]) -> Workspace:
        """A workspace for so many rows of at most so many positions; the one before must not be used any more.

        Args:
            rows: number of rows.
            positions: positions of the longest.
            make: makes a cache of so many positions.
        """
        kept = self._kept
        if kept is not None and kept.cache.rows == rows and kept.cache.capacity >= positions:
            kept.cache.clear()
            return kept
        self._kept = None  # its memory is free before the other's is taken
        made = Workspace(make(-(-positions // self.block) * self.block), Replayer(self))
        if self.record is not None:
            self._kept = made
        return made


def rows_to_keep(held: Sequence[int], wanted: Collection[int], recorded: bool) -> list[int] | None:
    """Places of the rows that stay when others have ended; None where all stay in memory.

    Where steps are recorded, rows that have ended are computed with the others until they are half of all: fewer rows
    are another recording, and take as long.
    """
    if len(wanted) == len(held) or (recorded and 2 * len(wanted) > len(held)):
        return None
    return [at for at, number in enumerate(held) if number in wanted]
