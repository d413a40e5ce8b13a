"""The size of a run, and an estimate of its remaining time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import torch
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.config.steps import StepSizes
from megatron.parallel.tensor.shards import collect_specs
from megatron.topology.layout import Layout
from megatron.training.assembly import Engines

FIRST_ESTIMATE = 10
"""Iterations after which the whole run is estimated."""

_STARTING = 2
"""First iterations of a process, which are slower; they count only while there are no later ones."""

_RECENT = 100
"""Number of the last iterations that the estimate averages."""

_FORWARD_SHARE = 1 / 3
"""Time of an evaluation's micro-batch over a training one's, until one has been measured."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters.

    Args:
        total: parameters of the whole model, without padding, each once.
        largest: parameters on the rank that holds most, with its padding and its copies of others' parameters.
    """

    total: int
    largest: int


def model_size(engines: Engines) -> ModelSize:
    """Counts the parameters of the whole model. Every rank calls it."""
    topology = engines.topology
    specs = [spec for stage in engines.stages for _, spec in collect_specs(stage).values()]
    replicas = {True: topology.expert_dp, False: topology.dp}
    own = sum(
        math.prod(spec.logical_shape)
        for spec in specs
        if (topology.tp.rank == 0 or spec.unshared) and replicas[spec.of_expert].rank == 0 and not spec.tied_copy
    )
    held = sum(parameter.numel() for stage in engines.stages for parameter in stage.parameters())
    total, largest = torch.tensor([own]), torch.tensor([held])
    topology.control.all_reduce(total).wait()
    topology.control.all_reduce(largest, dist.ReduceOp.MAX).wait()
    return ModelSize(int(total), int(largest))


def format_size(size: ModelSize, tokens: int, seen: int) -> str:
    """The size of a run as a section like those of its configuration."""
    rows = {"parameters": size.total, "parameters_on_the_fullest_rank": size.largest, "tokens_to_see": tokens}
    if seen:
        rows["tokens_seen_before"] = seen
    return "\n".join(["size:", *(f"  {name} {'.' * (46 - len(name))} {value:,}" for name, value in rows.items())])


class Forecast:
    """Estimates how long the rest of a run takes, from what its iterations, evaluations and saves took so far.

    An iteration's time goes with its micro-batches, the filling of the pipeline, and the operations of its sequences,
    so that growing batches and sequences are foreseen. Only what this process has done counts, whatever the run did
    before it was resumed.

    Args:
        config: resolved configuration.
        sizes: sizes of the run's steps.
        layout: mesh of the run.
        train_iters: iterations of the whole run.
        evaluation_rounds: global batches of an evaluation of the validation set, and of the test set.
        work: operations of a sequence of some length, of which only the ratios count.
    """

    def __init__(
        self,
        config: RunConfig,
        sizes: StepSizes,
        layout: Layout,
        train_iters: int,
        evaluation_rounds: tuple[int, int] = (0, 0),
        work: Callable[[int], float] = float,
    ) -> None:
        self._config = config
        self._sizes = sizes
        self._work = work
        self._train_iters = train_iters
        self._evaluation_rounds = evaluation_rounds
        self._filling = (layout.pp - 1) / layout.chunks
        self._steps: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._pauses: dict[str, tuple[int, float]] = {}
        self.done = 0

    def step(self, consumed_samples: int, seconds: float, length: int | None = None) -> None:
        """Records an iteration that began when so many samples had been consumed.

        Args:
            consumed_samples: these.
            seconds: its time.
            length: tokens of its sequences; None for the full length.
        """
        if self.done == _STARTING:
            self._steps.clear()
        self.done += 1
        slots = self._sizes.batches.num_micro_batches(consumed_samples) + self._filling
        self._steps.append((slots * self._share(length or self._sizes.lengths.full), seconds))

    def _share(self, length: int) -> float:
        """Time of a micro-batch over that of one of full length."""
        return self._work(length) / self._work(self._sizes.lengths.full)

    def pause(self, what: str, seconds: float) -> None:
        """Records the time of an evaluation, a save or a check."""
        times, total = self._pauses.get(what, (0, 0.0))
        self._pauses[what] = times + 1, total + seconds

    def remaining_s(self, iteration: int, consumed_samples: int) -> float | None:
        """Seconds from an iteration's log line to the run's end; None before the first one of this process."""
        slots = sum(slots for slots, _ in self._steps)
        if not slots:
            return None
        per_slot = sum(seconds for _, seconds in self._steps) / slots
        left = self._train_iters - iteration
        seconds = per_slot * sum(
            (ahead.micro_batches + ahead.iterations * self._filling) * self._share(ahead.length)
            for ahead in self._sizes.ahead(iteration, consumed_samples, left)
            if ahead.taken
        )
        for what, times in self.pauses_left(iteration).items():
            done, total = self._pauses.get(what, (0, 0.0))
            seconds += times * (total / done if done else self._unmeasured_s(what, per_slot))
        return seconds

    def pauses_left(self, iteration: int) -> Mapping[str, int]:
        """Evaluations, saves and checks from an iteration's log line, which those due with it follow, to the end."""
        config, last = self._config, self._train_iters
        validates, tests = (rounds > 0 for rounds in self._evaluation_rounds)
        every, saves = config.validation.eval_interval, config.checkpoint.save_interval
        # The checkpoint at the end comes last, whether or not one was due with the last iteration.
        return {
            "evaluate": (_due(every, iteration - 1, last) if validates else 0) + validates + tests,
            "save": (_due(saves, iteration - 1, last) + 1) if config.checkpoint.save else 0,
            "check": _due(config.training.check_replicas, iteration, last),
        }

    def _unmeasured_s(self, what: str, per_slot: float) -> float:
        """Seconds of a pause that this process has not measured yet."""
        if what != "evaluate":
            return 0.0
        batches = self._sizes.batches
        count = batches.global_batch_size // batches.samples_per_micro_batch
        return max(self._evaluation_rounds) * (count + self._filling) * per_slot * _FORWARD_SHARE


def _due(every: int | None, iteration: int, last: int) -> int:
    return last // every - iteration // every if every else 0


def format_estimate(iterations: int, left: int, seconds: float, now: datetime) -> str:
    """The log line of the estimate, which no script takes for a training line."""
    took = f"{seconds / 3600:.2f} hours" if seconds >= 36 else f"{seconds:.0f} seconds"
    line = f" estimate after {iterations} iterations: {took} more for the other {left:,}"
    try:
        return f"{line}, until {now + timedelta(seconds=seconds):%Y-%m-%d %H:%M %Z}"
    except OverflowError:  # no calendar goes so far
        return line
