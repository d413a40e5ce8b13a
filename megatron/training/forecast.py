"""The size of a run, and an estimate of its remaining time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import torch
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.config.steps import StepSizes
from megatron.distributed.layout import Layout
from megatron.parallel.tensor.shards import collect_specs
from megatron.training.assembly import Engines

FIRST_ESTIMATE = 10
"""Iterations before the first estimate of the whole run's time."""

_SLOW_STEPS = 2
"""First iterations of a process, which are slower; they count only until there are later ones."""

_RECENT = 100
"""Most recent iterations over which the estimate averages."""

_FORWARD_SHARE = 1 / 3
"""Time of an evaluation micro-batch relative to a training micro-batch, until an evaluation has been measured."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts.

    Args:
        total: parameters of the whole model, without padding, each counted once.
        largest: parameters on the fullest rank, with padding and copies of parameters from other ranks.
    """

    total: int
    largest: int


def model_size(engines: Engines) -> ModelSize:
    """Count the parameters of the whole model. Every rank calls it."""
    topology = engines.topology
    specs = [spec for stage in engines.stages for _, spec in collect_specs(stage).values()]
    replicas = {True: topology.expert_dp, False: topology.dp}
    unique_count = sum(
        math.prod(spec.logical_shape)
        for spec in specs
        if (topology.tp.rank == 0 or spec.unshared) and replicas[spec.of_expert].rank == 0 and not spec.tied_copy
    )
    stored_count = sum(parameter.numel() for stage in engines.stages for parameter in stage.parameters())
    total, largest = torch.tensor([unique_count]), torch.tensor([stored_count])
    topology.control.all_reduce(total).wait()
    topology.control.all_reduce(largest, dist.ReduceOp.MAX).wait()
    return ModelSize(int(total), int(largest))


def format_size(size: ModelSize, tokens: int, earlier_tokens: int) -> str:
    """Format the size of a run like a section of its configuration."""
    rows = {"parameters": size.total, "parameters_on_the_fullest_rank": size.largest, "tokens_to_see": tokens}
    if earlier_tokens:
        rows["tokens_seen_before"] = earlier_tokens
    return "\n".join(["size:", *(f"  {name} {'.' * (46 - len(name))} {value:,}" for name, value in rows.items())])


class Forecast:
    """Estimate of a run's remaining time from its past iterations, evaluations and saves.

    The time of an iteration is proportional to its micro-batches plus the pipeline's fill, and to the operations of its
    sequences, so that growing batches and sequences are accounted for. Only this process's measurements count; earlier
    parts of a resumed run do not.

    Args:
        config: resolved configuration.
        sizes: sizes of the run's steps.
        layout: mesh of the run.
        train_iters: iterations of the whole run.
        evaluation_batches: global batches of an evaluation of the validation set, and of the test set.
        work: operations for a sequence length; only ratios matter.
    """

    def __init__(
        self,
        config: RunConfig,
        sizes: StepSizes,
        layout: Layout,
        train_iters: int,
        evaluation_batches: tuple[int, int] = (0, 0),
        work: Callable[[int], float] = float,
    ) -> None:
        self._config = config
        self._sizes = sizes
        self._work = work
        self._train_iters = train_iters
        self._evaluation_batches = evaluation_batches
        self._fill = (layout.pp - 1) / layout.chunks
        self._steps: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._pauses: dict[str, tuple[int, float]] = {}
        self.done = 0

    def step(self, consumed_samples: int, seconds: float, length: int | None = None) -> None:
        """Record an iteration.

        Args:
            consumed_samples: samples consumed before it.
            seconds: its time.
            length: tokens of its sequences; None for the full length.
        """
        if self.done == _SLOW_STEPS:
            self._steps.clear()
        self.done += 1
        slots = self._sizes.batches.num_micro_batches(consumed_samples) + self._fill
        self._steps.append((slots * self._relative_time(length or self._sizes.lengths.full), seconds))

    def _relative_time(self, length: int) -> float:
        """Time of a micro-batch relative to a micro-batch of full length."""
        return self._work(length) / self._work(self._sizes.lengths.full)

    def pause(self, activity: str, seconds: float) -> None:
        """Record the time of an evaluation, a save or a check."""
        times, total = self._pauses.get(activity, (0, 0.0))
        self._pauses[activity] = times + 1, total + seconds

    def remaining_s(self, iteration: int, consumed_samples: int) -> float | None:
        """Seconds from an iteration's log line to the run's end; None before this process's first iteration."""
        slots = sum(slots for slots, _ in self._steps)
        if not slots:
            return None
        per_slot = sum(seconds for _, seconds in self._steps) / slots
        remaining_iterations = self._train_iters - iteration
        seconds = per_slot * sum(
            (ahead.micro_batches + ahead.iterations * self._fill) * self._relative_time(ahead.length)
            for ahead in self._sizes.ahead(iteration, consumed_samples, remaining_iterations)
            if ahead.updates
        )
        # Pauses from the iteration's log line, which precedes those due with it, to the end. The final checkpoint comes
        # last, even if a save was due with the last iteration.
        config, last = self._config, self._train_iters
        validates, tests = (count > 0 for count in self._evaluation_batches)
        every, saves = config.validation.eval_interval, config.checkpoint.save_interval
        pauses = {
            "evaluate": (_count_due(every, iteration - 1, last) if validates else 0) + validates + tests,
            "save": (_count_due(saves, iteration - 1, last) + 1) if config.checkpoint.save else 0,
            "check": _count_due(config.training.check_replicas, iteration, last),
        }
        for activity, times in pauses.items():
            done, total = self._pauses.get(activity, (0, 0.0))
            if done:
                seconds += times * (total / done)
            elif activity == "evaluate":
                batches = self._sizes.batches
                count = batches.global_batch_size // batches.samples_per_micro_batch
                seconds += times * (max(self._evaluation_batches) * (count + self._fill) * per_slot * _FORWARD_SHARE)
        return seconds


def _count_due(every: int | None, iteration: int, last: int) -> int:
    return last // every - iteration // every if every else 0


def format_estimate(iterations: int, remaining: int, seconds: float, current_time: datetime) -> str:
    """Format the estimate so that no script mistakes it for a training line."""
    took = f"{seconds / 3600:.2f} hours" if seconds >= 36 else f"{seconds:.0f} seconds"
    line = f" estimate after {iterations} iterations: {took} more for the other {remaining:,}"
    try:
        return f"{line}, until {current_time + timedelta(seconds=seconds):%Y-%m-%d %H:%M %Z}"
    except OverflowError:  # beyond the calendar
        return line
