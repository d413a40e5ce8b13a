"""Islands of a process each, as threads of the test: they meet at a store, and exchange over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.data.batch import Batch
from megatron.diloco.joining import Joining
from megatron.diloco.membership import Islands
from megatron.diloco.rounds import Rounds
from megatron.diloco.store import IslandStore, serve
from megatron.training.assembly import Engines
from megatron.training.step import take_batches, train_step
from tests.support.tiny import merge, tiny_checkpoints, tiny_engines, tiny_tensors

Changes = Mapping[str, Mapping[str, Any]]
SMALL: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2},
    "precision": {"fp64": True},
    "training": {"global_batch_size": 4, "train_iters": 12},
}
"""A model that takes milliseconds per step."""


def batches_of(engines: Engines, first: int = 0) -> Iterator[Batch]:
    """This island's micro-batches from iteration ``first`` on, in the order that the data loader keeps."""
    config, dp = engines.config, engines.topology.dp
    micro, islands = config.training.micro_batch_size, config.islands
    at = first * config.training.global_batch_size
    while True:
        start = at + dp.rank * micro * islands.islands + (islands.island or 0)
        draws = list(range(start, start + micro * islands.islands, islands.islands))
        yield Batch(
            sample_ids_b=torch.tensor(draws), draw_ids_b=torch.tensor(draws), **tiny_tensors(config, draws, False)
        )
        at += micro * dp.size * islands.islands


def step(engines: Engines, batches: Iterator[Batch], iteration: int) -> float:
    """Takes one step; returns its loss."""
    config, layout = engines.config, engines.topology.layout
    count = config.training.global_batch_size // (config.training.micro_batch_size * layout.dp * config.islands.islands)
    step_batches = take_batches(batches, count, engines.topology.device)
    return train_step(engines, step_batches, iteration, config.optimizer.lr, config.optimizer.weight_decay).loss


@dataclass
class Island:
    """State and log of an island."""

    engines: Engines
    rounds: Rounds | None = None
    losses: list[float] = field(default_factory=list)
    reports: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Lines and numbers of its rounds."""

    def note_report(self, line: str, values: dict[str, Any]) -> None:
        """Notes a report of its rounds."""
        self.reports.append((line, values))

    def note_line(self, line: str) -> None:
        """Notes a line."""
        self.reports.append((line, {}))

    @property
    def params(self) -> dict[str, Tensor]:
        """Its parameters, by logical name."""
        slots = [slot for buffer in self.engines.buffers for bucket in buffer.buckets for slot in bucket.slots]
        return {slot.logical_name: slot.param.detach().clone() for slot in slots}

    @property
    def lines(self) -> list[str]:
        """The lines of its rounds."""
        return [line for line, _ in self.reports]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The numbers of its rounds."""
        return [values for _, values in self.reports if values]


AfterStep = Callable[[Island, int], None]


def build_island(changes: Changes, islands: Islands | None, number: int = 0, count: int = 1) -> Island:
    """An island with its rounds; without ``islands`` the only island, or an island of a reference."""
    islands_section: Changes = {}
    if count > 1:
        islands_section = {"islands": {"islands": count, "island": number, "islands_address": "127.0.0.1:1"}}
    engines = tiny_engines(merge(SMALL, changes, islands_section))
    island = Island(engines)
    if engines.outer is not None and (islands is not None or count == 1):
        start, end = engines.plan.activation(Point.OUTER).warmup_iters, engines.config.training.train_iters
        assert end is not None
        schedule = RoundSchedule(engines.outer.options, start, end)
        checkpoints = tiny_checkpoints(engines)
        joining = None
        if islands is not None:
            joining = Joining(engines.stages, engines.outer, islands, checkpoints.stateful_parts, island.note_line)
        island.rounds = Rounds(engines.outer, schedule, islands, island.note_report, joining)
        island.rounds.progress = checkpoints.progress  # type: ignore[attr-defined]
    return island


def train_island(island: Island, iterations: int, first: int = 0, before_round: AfterStep | None = None) -> Island:
    """Trains an island from iteration ``first`` on, with rounds where it has any."""
    batches, rounds = batches_of(island.engines, first), island.rounds
    done = first
    while done < iterations:
        if rounds is not None:
            rounds.before_step(done)
        island.losses.append(step(island.engines, batches, done))
        done += 1
        if rounds is None:
            continue
        progress = rounds.progress  # type: ignore[attr-defined]
        progress.iteration = done
        if before_round is not None:
            before_round(island, done)
        rounds.after_step(done, island.losses[-1])
        if rounds.left_behind:
            assert rounds.join()
            done = progress.iteration
            batches = batches_of(island.engines, done)
    return island


def meet(
    port: int, number: int, count: int, quorum: int | None = None, seconds: float = 10.0, device: str = "cpu"
) -> Islands:
    """An island's membership, before it has come to the start."""
    store = IslandStore("127.0.0.1", port, 10.0)
    return Islands(store, number, count, quorum or count, seconds, 20.0, None, torch.device(device))


def in_threads(calls: Sequence[Callable[[], Any]], timeout: float = 100.0) -> list[Any]:
    """Runs calls at the same time and returns their results.

    Raises:
        Exception: the first exception of any call.
    """
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "an island hangs"
    if errors:
        raise errors[0]
    return results


def train_islands(
    count: int,
    changes: Changes,
    iterations: int = 12,
    before_round: AfterStep | None = None,
    quorum: int | None = None,
    device: str = "cpu",
) -> list[Island]:
    """Trains islands from the start to the end, with groups for tensors on a device."""
    store = serve("127.0.0.1", 0)

    def run(number: int) -> Island:
        islands = meet(store.port, number, count, quorum, device=device)
        assert islands.begin_generation(0, False, {})
        island = build_island(changes, islands, number, count)
        try:
            return train_island(island, iterations, before_round=before_round)
        finally:
            islands.leave()

    return in_threads([partial(run, number) for number in range(count)])
