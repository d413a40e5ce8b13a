"""Timing of training steps with sets of compressors, in engines that are thrown away."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.logs import LoggingConfig
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.distributed.agreement import run_together, take_from_rank_0
from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.topology import Topology
from megatron.parallel.pipeline.list_schedule import MeasuredPipeline
from megatron.planner.auto import LossEstimate, MeasuredTraffic
from megatron.planner.trials import TrialRounds
from megatron.training.assembly import Engines, build_engines
from megatron.training.flushless import complete_steps
from megatron.training.loss_guard import LossGuard, held_out_batches
from megatron.training.run_plan import RunPlan
from megatron.training.saved_choice import describe_choice, specs_in_use
from megatron.training.schedule_choice import ScheduleChoice, StageTimes, make_pipeline
from megatron.training.step import open_loader, take_full_batch, train_step
from megatron.training.timers import Timers


@dataclass(frozen=True)
class SetTime:
    """Time of a training step with a set of compressors.

    Args:
        seconds: median seconds of a step, on the slowest rank.
        gains: whether the set certainly saves time.
        traffic: traffic in a step, by point.
        estimate: the estimated loss with the set; None unless ``choose_set`` has chosen it.
    """

    seconds: float
    gains: bool
    traffic: Mapping[Point, MeasuredTraffic] = field(default_factory=dict)
    estimate: LossEstimate | None = None


def time_sets(
    topology: Topology,
    vocab_size: int,
    length: RunLength,
    plan: RunPlan,
    consumed_samples: int,
    configs: Sequence[RunConfig],
    predicted_s: Sequence[float],
    stage_times: Sequence[StageTimes | None],
    all_at_once: bool,
    spent_s: float = 0.0,
    choose_set: Callable[[Sequence[SetTime]], int | None] = lambda set_times: None,
) -> list[SetTime]:
    """Time training steps in new engines, past all warm-ups, in rounds of a step with each set. A collective call.

    The run's random numbers, its position in the data and its logs do not change.

    Args:
        topology: the ranks.
        vocab_size: entries of the vocabulary.
        length: length of the run, for warm-ups in fractions of it.
        plan: data of the run; all steps use its next samples, as many as in a full batch, of full length.
        consumed_samples: position of the run in its data.
        configs: resolved configurations with each set, the first without compressors; may be empty.
        predicted_s: predicted seconds of an iteration with each set.
        stage_times: for each set with ``--pipeline-schedule auto``, the predicted times of the stages.
        all_at_once: keep the engines of all sets; otherwise those of a set are built for each of its steps, and the
            first step of new engines is not timed.
        spent_s: seconds that the choice has taken so far.
        choose_set: chooses the set whose loss is estimated by its number, or None; rank 0 decides.

    Returns:
        The time with each set; the same on all ranks.

    Raises:
        UserError: on every rank, when engines cannot be built.
    """
    # The reduction of delayed gradients runs beside the next step, which must be one of the same set.
    all_at_once = all_at_once and not any(config.parallel.delay for config in configs)
    trials = [
        SetTrial(topology, vocab_size, length, plan, consumed_samples, config, times)
        for config, times in zip(configs, stage_times, strict=True)
    ]
    rounds = TrialRounds(predicted_s, plan.train_iters, spent_s, keeps_engines=all_at_once)
    group = topology.control.pg
    # All ranks compare the same times, but their libraries may round differently.
    numbers, gaining = take_from_rank_0(group, (rounds.next_round(), rounds.gaining()))
    while numbers:
        start = time.perf_counter()
        times: dict[int, float] = {}
        for number in numbers:
            if not all_at_once:
                trials[number].time_step()
            times[number] = trials[number].time_step()
            if not all_at_once:
                _drop_engines([trials[number]])
        rounds.add(times, time.perf_counter() - start)
        numbers, gaining = take_from_rank_0(group, (rounds.next_round(), rounds.gaining()))
        needed = {*numbers, *gaining}
        _drop_engines([trial for number, trial in enumerate(trials) if number not in needed])
    set_times = [
        SetTime(rounds.typical_s(number), number in gaining, trial.mean_traffic())
        for number, trial in enumerate(trials)
    ]
    chosen = take_from_rank_0(group, choose_set(set_times))
    if chosen is not None:
        set_times[chosen] = dataclasses.replace(set_times[chosen], estimate=trials[chosen].fit_to_budget())
    _drop_engines(trials)
    return set_times


def _drop_engines(trials: Sequence[SetTrial]) -> None:
    """Drop the engines that trials have kept, and free their memory."""
    kept = [trial for trial in trials if trial.engines is not None]
    for trial in kept:
        trial.drop_engines()
    if kept:
        free_memory()


class SetTrial:
    """Training steps with a configuration. All methods are collective calls.

    Args:
        topology, vocab_size, length, plan, consumed_samples: see ``time_sets``.
        config: resolved configuration, with the compressors.
        stage_times: times of the stages, for which ``--pipeline-schedule auto`` chooses the schedule
            (``make_pipeline``). None to measure them in the first two steps of new engines.
    """

    def __init__(
        self,
        topology: Topology,
        vocab_size: int,
        length: RunLength,
        plan: RunPlan,
        consumed_samples: int,
        config: RunConfig,
        stage_times: StageTimes | None = None,
    ) -> None:
        precision = config.precision
        if precision.fp16:  # the steps that search for a loss scale update nothing
            precision = dataclasses.replace(precision, loss_scale=1.0)
        self._config = dataclasses.replace(config, logging=LoggingConfig(), precision=precision)
        self._topology, self._vocab_size, self._length = topology, vocab_size, length
        self._plan, self._consumed_samples, self._stage_times = plan, consumed_samples, stage_times
        self.engines: Engines | None = None
        self._batches: Sequence[Batch] = ()
        self._steps = 0
        self._first_step: dict[str, float] = {}  # of the latest engines
        self._warm_steps: list[dict[str, float]] = []

    def _take_step(self, engines: Engines) -> None:
        train_step(engines, self._batches, engines.plan.warmup_iters + self._steps, lr=0.0, weight_decay=0.0)
        self._steps += 1

    def time_step(self) -> float:
        """Take a step; return its seconds on the slowest rank, the same on all ranks."""
        control = self._topology.control
        if self.engines is None:
            self.engines = engines = run_together(
                control.pg, lambda: build_engines(self._config, self._topology, self._vocab_size, self._length)
            )
            assert self._plan.train_set is not None
            with open_loader(engines, self._plan.train_set, self._consumed_samples, trains=True) as loader:
                self._batches = run_together(control.pg, partial(take_full_batch, engines, loader))
            self._steps = 0
            if ScheduleChoice.is_needed(engines):
                self._choose_schedule(engines)
        engines = self.engines
        engines.ledger.take_totals()
        control.barrier()
        start = time.perf_counter()
        self._take_step(engines)
        engines.ledger.clock.synchronize()
        values = {"seconds": time.perf_counter() - start}
        totals = engines.ledger.take_totals()
        for point in Point:
            for name in ("wire_bytes", "waited_s"):
                values[f"{name} {point.value}"] = totals.get(point.value, {}).get(name, 0.0)
        columns = list(zip(*gather_rows(control, Ledger(), list(values.values())), strict=True))
        means = {name: sum(column) / len(column) for name, column in zip(values, columns, strict=True)}
        if self._steps == 1:
            self._first_step = means
        else:
            self._warm_steps.append(means)
        return max(columns[0])

    def mean_traffic(self) -> dict[Point, MeasuredTraffic]:
        """Traffic of a step, averaged over the steps, by point.

        The first step of new engines, which warms up, counts only if there is no other.
        """
        steps = self._warm_steps or [self._first_step]
        traffic = {
            point: MeasuredTraffic(
                sum(step[f"wire_bytes {point.value}"] for step in steps) / len(steps),
                sum(step[f"waited_s {point.value}"] for step in steps) / sum(step["seconds"] for step in steps),
            )
            for point in Point
        }
        return {point: each for point, each in traffic.items() if each.sent_bytes or each.waits}

    def fit_to_budget(self) -> LossEstimate:
        """Replace compressors by gentler settings until the expected loss fits the budget, as the run's own checks do:
        by the loss on held-out samples, and by the residuals and noise of gradients in a step before each check."""
        if self.engines is None:
            self.time_step()
        assert self.engines is not None
        engines, group = self.engines, self._topology.control.pg
        batches = run_together(group, lambda: held_out_batches(engines, self._plan))
        guard = run_together(group, lambda: LossGuard(engines, batches, self._length))
        is_eased = True
        while is_eased:
            guard.watch_noise()
            self._take_step(engines)
            complete_steps(engines, Timers())
            values = guard.check(0).values
            is_eased = values["eased"] is not None
        specs = specs_in_use(describe_choice(engines.config, engines.topology.layout, engines.plan))
        return LossEstimate(specs, values["expected_increase"], values["measured_increase"], values["seconds"])

    def _choose_schedule(self, engines: Engines) -> None:
        if self._stage_times is not None:
            engines.pipeline.measured = MeasuredPipeline(make_pipeline(self._stage_times, engines.pipeline.limits))
            return
        choice = ScheduleChoice(engines, settling_steps=1, measured_steps=1, trial_rounds=0)
        while not choice.is_due:
            self._take_step(engines)
        choice.decide(len(self._batches), self._config.model.seq_length, lambda line: None)

    def drop_engines(self) -> None:
        """Drop the engines; ``free_memory`` frees their memory."""
        assert self.engines is not None
        release_engines(self.engines)
        self.engines, self._batches = None, ()


def release_engines(engines: Engines) -> None:
    """Release engines after their last use, so that ``free_memory`` can free them."""
    complete_steps(engines, Timers())
    for buffer in engines.buffers:
        buffer.release()


def free_memory() -> None:
    """Free the memory of released engines that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
