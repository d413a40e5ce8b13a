"""Several islands, each with its own world, that meet at a store in the test's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.storage import ShardReader
from megatron.config.islands import ADDRESS_VARIABLE, ISLAND_VARIABLE
from megatron.diloco.store import serve
from tests.support.cli import CliResult, RankProcesses, launch_ranks_cli
from tests.support.events import read_events

SCRIPT = "pretrain_gpt.py"


class IslandProcesses:
    """K islands of some ranks each, which all run the same flags; use as a context manager, as ``RankProcesses``.

    Args:
        islands: how many.
        world_size: ranks of each.
        flags: flags of the program.
        env: variables of the environment that some islands have, by number.
    """

    def __init__(
        self, islands: int, world_size: int, flags: Sequence[str], env: Mapping[int, Mapping[str, str]] | None = None
    ) -> None:
        self._store: dist.TCPStore = serve("127.0.0.1", 0)
        self._world_size, self._flags = world_size, [*flags, "--islands", str(islands)]
        self.islands: list[RankProcesses] = []
        for number in range(islands):
            self.islands.append(self._start(number, (env or {}).get(number)))

    def _start(self, number: int, env: Mapping[str, str] | None = None) -> RankProcesses:
        variables = {ISLAND_VARIABLE: str(number), ADDRESS_VARIABLE: f"127.0.0.1:{self._store.port}", **(env or {})}
        return launch_ranks_cli(self._world_size, [SCRIPT, *self._flags], variables)

    def restart(self, number: int) -> None:
        """Starts an island again, after it has ended."""
        self.islands[number].close()
        self.islands[number] = self._start(number)

    def wait(self, timeout: float = 120.0) -> list[list[CliResult]]:
        """The results of each island's ranks."""
        return [island.wait(timeout) for island in self.islands]

    def __enter__(self) -> IslandProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for island in self.islands:
            island.close()


def run_islands(islands: int, world_size: int, flags: Sequence[str], timeout: float = 120.0) -> list[list[CliResult]]:
    """Runs islands to the end.

    Raises:
        AssertionError: when a rank failed.
    """
    with IslandProcesses(islands, world_size, flags) as running:
        results = running.wait(timeout)
    for island in results:
        for result in island:
            result.check()
    return results


events = partial(read_events, may_be_cut=True)


def losses(path: Path) -> list[float]:
    """Loss of each iteration."""
    return [event["lm_loss"] for event in events(path) if not event["skipped_iterations"]]


def saved_tensors(root: Path, iteration: int, prefix: str = "") -> dict[str, Tensor]:
    """The logical tensors of a checkpoint with names that begin with ``prefix``."""
    folder = root / f"iter_{iteration:07d}"
    reader = ShardReader(folder, read_manifest(folder))
    tensors: dict[str, Any] = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in reader.read_metadata().state_dict_metadata.items()
        if isinstance(metadata, TensorStorageMetadata) and name.startswith(prefix)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
