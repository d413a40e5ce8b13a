"""A run from its start, or from a choice of its compressors, to its end or to the next choice.

When links become slower or faster, a run with ``--compress-adapt`` saves itself, chooses as at its start, and goes on
as a run that resumes from that checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import Iteration
from megatron.checkpoint.folder_lock import FolderLock
from megatron.compression.schedule import RunLength
from megatron.config.run import RunConfig
from megatron.data.build import Datasets
from megatron.diloco.membership import Islands
from megatron.distributed.agreement import gather_texts, run_together, take_from_rank_0
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.topology import Topology
from megatron.optimizer.schedules import LRSchedule
from megatron.optimizer.step_summary import ExitReason
from megatron.planner.auto import AutoChoice
from megatron.planner.settings import Settings
from megatron.training.announce import log_engines, rank_0_log
from megatron.training.assembly import Engines, build_engines
from megatron.training.auto_compression import choose_compressors
from megatron.training.certificate import RunCertificate
from megatron.training.compression_notes import compression_notes
from megatron.training.islands import begin_rounds, folders_of_others, join_islands, reporting_refusal
from megatron.training.loss_guard import LossGuard, choose_interval, held_out_batches
from megatron.training.machine_check import machine_notes
from megatron.training.persistence import RunCheckpoints
from megatron.training.planned_schedule import plan_schedule
from megatron.training.progress_state import Progress
from megatron.training.report import Reporter
from megatron.training.run_card import write_run_card
from megatron.training.run_plan import RunPlan
from megatron.training.saved_choice import SavedChecks, keep_choice, restore_choice
from megatron.training.saved_run import SavedRun
from megatron.training.saved_schedule import restore_schedule
from megatron.training.schedule_choice import STEPS, ScheduleChoice
from megatron.training.step_time_check import StepTimeCheck
from megatron.training.timers import Timers
from megatron.training.trainer import Trainer
from megatron.training.trial_steps import free_memory, release_engines, time_sets


@dataclass(frozen=True)
class RunParts:
    """Parts of a run that stay the same when it chooses its compressors again.

    Args:
        env, topology: this process, and the ranks.
        plan: steps and data of the run.
        datasets: data sets for training, validation and test.
        vocab_size: entries of the vocabulary.
        length: length of the run, for warm-ups in fractions of it.
        islands: membership of the islands; None for a single one.
        lock: lock of the folder that rank 0 saves to.
        sections: more sections of the flags, by name.
        pretrained: folder and iteration of a language model that a new run starts from.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
        log: prints lines for the user, on the last rank.
    """

    env: LaunchEnvironment
    topology: Topology
    plan: RunPlan
    datasets: Datasets
    vocab_size: int
    length: RunLength
    islands: Islands | None
    lock: FolderLock | None
    sections: Mapping[str, Any]
    pretrained: tuple[str, Iteration] | None
    flag_fields: Collection[str]
    log: Callable[[str], None]

    def build_engines(self, config: RunConfig) -> Engines:
        """Build this rank's engines. A collective call."""
        return run_together(
            self.topology.control.pg, lambda: build_engines(config, self.topology, self.vocab_size, self.length)
        )

    def has_steps_left(self, config: RunConfig, saved: SavedRun | None) -> bool:
        """Whether steps are left to take."""
        iteration = 0 if saved is None else saved.progress.iteration
        return not config.validation.skip_train and iteration < self.plan.train_iters


@dataclass(frozen=True)
class ChosenRun:
    """A run with its compressors.

    Args:
        config: resolved configuration with the specs and settings of the user and those that were chosen.
        saved: the checkpoint that it begins with, if any.
        choice: the choice of ``--compress auto``, if it was made now.
        settings: the chosen settings.
        is_kept: whether the choice is the checkpoint's.
        choice_s: seconds that a choice within the run took; 0 for the choice at its start.
    """

    config: RunConfig
    saved: SavedRun | None
    choice: AutoChoice | None = None
    settings: Settings = field(default_factory=dict)
    is_kept: bool = False
    choice_s: float = 0.0


def choose_or_keep(parts: RunParts, config: RunConfig, saved: SavedRun | None, again: bool = False) -> ChosenRun:
    """Choose the compressors of ``--compress auto``, or keep those of the checkpoint. A collective call.

    Args:
        parts: parts of the run.
        config: resolved configuration.
        saved: the checkpoint that the run begins with, if any.
        again: choose even if the checkpoint, which this run itself has saved, holds a choice.

    Raises:
        UserError: on every rank, when the run cannot be predicted, or cannot begin with the checkpoint.
    """
    start, topology, log = time.perf_counter(), parts.topology, rank_0_log(parts.topology)
    kept_choice = None if again else keep_choice(config, topology, saved, parts.flag_fields, log)
    if kept_choice is not None:
        kept_config, settings = kept_choice
        return ChosenRun(kept_config, saved, settings=settings, is_kept=config.compression.is_auto)
    if saved is not None and not again:
        # Check that the run can begin with the checkpoint, before the choice takes its time.
        engines = parts.build_engines(config)
        RunCheckpoints(engines, _build_schedule(config), Progress(), lambda line: None).load(saved, reads_data=False)
        release_engines(engines)
        del engines
        free_memory()
    timer = None
    progress = Progress() if saved is None else saved.progress
    remaining = replace(parts.plan, train_iters=max(parts.plan.train_iters - progress.iteration, 0))
    if parts.has_steps_left(config, saved):
        timer = partial(time_sets, topology, parts.vocab_size, parts.length, remaining, progress.consumed_samples)
    chosen_config, choice = choose_compressors(
        config, topology, parts.env, parts.vocab_size, remaining.train_iters, parts.flag_fields, timer, log
    )
    settings = {} if choice is None else choice.chosen.settings
    choice_s = time.perf_counter() - start if again else 0.0
    return ChosenRun(chosen_config, saved, choice, settings, choice_s=choice_s)


def resuming_config(config: RunConfig) -> RunConfig:
    """The configuration of a run that resumes from its own newest checkpoint."""
    checkpoint = replace(
        config.checkpoint,
        load=config.checkpoint.save,
        ckpt_step=None,
        pretrained_checkpoint=None,
        finetune=False,
        moe_use_upcycling=False,
        no_load_optim=False,
        no_load_lr_state=False,
    )
    return replace(config, checkpoint=checkpoint)


def train_segment(parts: RunParts, run: ChosenRun) -> ExitReason:
    """Build the engines, and train to the end or until the compressors are to be chosen again.

    Args:
        parts: parts of the run.
        run: the run with its compressors.

    Raises:
        UserError: on every rank, for data, files or checkpoints that cannot be used.
    """
    topology, plan, config, saved = parts.topology, parts.plan, run.config, run.saved
    with reporting_refusal(config, topology):
        engines = parts.build_engines(config)
        checks = restore_choice(saved, config, engines.plan) if saved is not None and run.is_kept else SavedChecks()
        if saved is not None:
            restore_schedule(engines, saved, run.choice is not None, rank_0_log(topology))
        plan_schedule(engines, rank_0_log(topology))
        notes = compression_notes(
            config, plan.train_set, config.replicas(parts.env.world_size), parts.length, plan.train_iters
        )
        notes += machine_notes(config, parts.env, topology.control.pg)
        log_engines(engines, parts.datasets, notes, parts.log)
        progress, schedule = Progress(), _build_schedule(config)
        timers = Timers(config.logging.timing_log_level, config.logging.timing_log_option, clock=engines.ledger.clock)
        reporter = Reporter(engines, plan, progress, timers)
        if run.is_kept or run.choice is not None:
            chosen, adapts = None if run.choice is None else run.choice.chosen, config.compression.compress_adapt
            warmup_iters = engines.plan.warmup_iters
            if ScheduleChoice.is_needed(engines):  # its steps have another schedule
                start = max(warmup_iters, 0 if saved is None else saved.progress.iteration)
                warmup_iters = start + STEPS + plan.sizes.skipped.count(start, start + STEPS)
            reporter.step_time_check = StepTimeCheck(
                chosen, warmup_iters, adapts, checks.s_per_token, checks.step_tokens, run.choice_s
            )
        guard = None
        if parts.has_steps_left(config, saved) and LossGuard.is_needed(engines):
            batches = run_together(topology.control.pg, lambda: held_out_batches(engines, plan))
            if not plan.valid_sets:
                parts.log("note: without validation data, --compress auto checks the loss on the last training samples")
            has_weights = saved is not None or parts.pretrained is not None
            due_at_start = run.choice is not None and has_weights
            iterations = plan.train_iters - (0 if saved is None else saved.progress.iteration)
            # The choice took each rank another time.
            interval = take_from_rank_0(
                topology.control.pg,
                choose_interval(config, parts.flag_fields, run.choice, iterations, checks.interval),
            )
            guard = run_together(
                topology.control.pg,
                lambda: LossGuard(engines, batches, parts.length, checks.loss, due_at_start, interval),
            )
        certificate = None
        if config.checkpoint.certificate:
            certificate = RunCertificate(engines, parts.sections, run.choice, reporter.step_time_check, guard)
        log = rank_0_log(topology)
        checkpoints = RunCheckpoints(
            engines, schedule, progress, log, parts.lock, certificate, guard, reporter.step_time_check, run.settings
        )
        island_folders = folders_of_others(config, saved, topology, engines.sync_warmup.steps)
        if saved is not None:
            checkpoints.load(saved, island_folders)
        elif parts.pretrained is not None:
            checkpoints.load_pretrained(*parts.pretrained)
        elif config.checkpoint.load:
            parts.log(f"no checkpoint in {config.checkpoint.load} yet: starting from random weights")
    start = 0 if saved is None else saved.progress.iteration
    begins = join_islands(engines, parts.env, start, parts.islands)
    # Raises UserError on every rank when a log cannot be opened.
    run_together(topology.control.pg, reporter.open)
    # All ranks save the run's ids in tracking services, which the last rank has opened.
    texts = gather_texts(topology.control.pg, json.dumps(reporter.sinks.tracked_runs))
    progress.tracked_runs |= json.loads(texts[-1])
    try:
        rounds = begin_rounds(engines, checkpoints, reporter, parts.islands, begins, plan.train_iters)
        reason = Trainer(engines, plan, checkpoints, reporter, rounds, guard).run()
    finally:
        if parts.islands is not None:
            parts.islands.leave()
        reporter.close()
    statements = checkpoints.certificate_record.statements if certificate is not None else None
    ends = topology.rank == 0 and reason is not ExitReason.CHOICE
    if ends and statements is not None and checkpoints.saved_to is not None:
        write_run_card(Path(checkpoints.saved_to), config, topology.layout, statements, log)
    release_engines(engines)
    return reason


def _build_schedule(config: RunConfig) -> LRSchedule:
    """Build the schedules of learning rate and weight decay."""
    training = config.training
    return LRSchedule.from_options(
        config.optimizer,
        global_batch_size=training.global_batch_size,
        seq_length=config.model.seq_length,
        train_iters=training.train_iters,
        train_samples=training.train_samples,
        train_tokens=training.train_tokens,
    )
