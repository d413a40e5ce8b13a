"""Checkpoints of a run: engines, schedules and counters together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.stateful import Scope, StatefulParts
from megatron.base.values import Values
from megatron.checkpoint.compressor_state import CompressorCheckpoint
from megatron.checkpoint.files import Iteration, checkpoint_folder, newest_before, saved_iterations
from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.load import load_tensors, saved_sections, saved_shapes
from megatron.checkpoint.logical import LogicalShard
from megatron.checkpoint.model_state import (
    DELAYED,
    MAIN,
    MODEL,
    OPTIMIZER,
    OUTER,
    buffer_tensors,
    delayed_tensors,
    main_tensors,
    map_to_dense_names,
    model_tensors,
    optimizer_tensors,
    outer_tensors,
)
from megatron.checkpoint.save import COMMON
from megatron.checkpoint.saver import CheckpointSaver
from megatron.checkpoint.state_slice import PREFIX
from megatron.compression.error_feedback import RESIDUAL
from megatron.config.merge import differing_flags
from megatron.distributed.agreement import raise_together, run_together
from megatron.models.classification import HEAD_POOLER, PRETRAINED_POOLER, TASK_HEAD
from megatron.models.stages import stage_layers
from megatron.optimizer.schedules import LRSchedule
from megatron.planner.settings import Settings, without_settings
from megatron.training.assembly import Engines
from megatron.training.certificate import CertificateRecord, RunCertificate
from megatron.training.changed_samples import sample_warnings
from megatron.training.loss_guard import LossGuard
from megatron.training.progress_state import Progress
from megatron.training.saved_choice import CHOICE, describe_choice
from megatron.training.saved_run import SavedRun, check_dense, check_optimizer
from megatron.training.saved_schedule import SCHEDULE, describe_schedule, gather_devices
from megatron.training.step_time_check import StepTimeCheck


class RunCheckpoints:
    """The checkpoints of a run.

    Args:
        engines, schedule, progress: objects to save, and to restore in place.
        log: prints lines for the user, on rank 0.
        lock: lock of the folder of ``--save``, on rank 0.
        certificate: collects the statements of ``--certificate``; None without that flag.
        loss_guard, time_check: checks of compressors that the run has chosen; None if it has chosen none.
        settings: settings that the run has chosen.
    """

    def __init__(
        self,
        engines: Engines,
        schedule: LRSchedule,
        progress: Progress,
        log: Callable[[str], None],
        lock: FolderLock | None = None,
        certificate: RunCertificate | None = None,
        loss_guard: LossGuard | None = None,
        time_check: StepTimeCheck | None = None,
        settings: Settings = MappingProxyType({}),
    ) -> None:
        self.run_config = config = engines.config
        self.config = config.checkpoint
        self._settings = settings
        self.engines = engines
        self.schedule = schedule
        self.progress = progress
        engines.plan.steps = progress
        self.log = log
        self.lock = lock
        self.certificate = certificate
        self.certificate_record = CertificateRecord()
        self.group = engines.topology.control.pg
        layout = engines.topology.layout
        self.compressors = CompressorCheckpoint(
            engines.sync,
            engines.channel,
            layout,
            engines.topology.coordinates,
            [stage_layers(config.model, layout, stage).start for stage in range(layout.num_virtual_stages)],
            config.parallel.message_parts > 1,
            engines.outer,
        )
        self.stateful_parts = _stateful_parts(engines, schedule, progress, log)
        describe = partial(describe_choice, config, layout, engines.plan, loss_guard, time_check, settings)
        self.stateful_parts.register_value(CHOICE, describe, None, Scope.DESCRIPTION)
        describe_pipeline = partial(describe_schedule, engines, gather_devices(engines))
        self.stateful_parts.register_value(SCHEDULE, describe_pipeline, None, Scope.DESCRIPTION)
        self.stateful_parts.register("certificate", self.certificate_record, Scope.LOGS)
        self.saver: CheckpointSaver | None = None
        self.saved_iteration: int | None = None
        if self.config.save:
            keep_last = self.config.keep_last
            if keep_last is not None and config.islands.several:
                # An island that is killed before it saves restarts from the checkpoint before, which others must still
                # have.
                keep_last = max(keep_last, 2)
            self.saver = CheckpointSaver(
                self.config.save, self.group, async_=self.config.async_save, keep_last=keep_last, log=log
            )

    @cached_property
    def config_yaml(self) -> str:
        """The resolved configuration, as saved: without the chosen compressors and settings, so that another run
        chooses its own."""
        config = without_settings(self.run_config, self._settings)
        return replace(config, compression=config.compression.without_choice()).to_yaml()

    def save(self) -> None:
        """Save the state after ``progress.iteration`` steps, unless it is saved already.

        Raises:
            UserError: on every rank, when it cannot be saved, or the folder belongs to another run by now.
        """
        iteration = self.progress.iteration
        if self.saver is None or self.saved_iteration == iteration:
            return
        raise_together(self.group, self.lock.explain_loss() if self.lock is not None else None)
        delayed = self.engines.delayed
        if delayed is not None:
            delayed.settle_states()
        tensors = model_tensors(self.engines.stages)
        if not self.config.no_save_optim:
            if delayed is not None:
                previous = None if delayed.correction is None else delayed.correction.previous
                tensors |= delayed_tensors(self.engines.optimizer, previous, delayed.in_flight is not None)
            tensors |= optimizer_tensors(self.engines.optimizer) | outer_tensors(self.engines.outer)
            tensors |= self.compressors.tensors(self.group)
        with self.engines.optimizer.publisher.exact_parameters():
            statements = None
            if self.certificate is not None:
                self.certificate_record.statements = statements = self.certificate.collect(iteration)
            common, last_update = self.stateful_parts.state_dict(), self.progress.last_update
            self.saver.save(iteration, tensors, common, self.config_yaml, last_update, statements)
        self.saved_iteration = iteration
        if self.certificate is not None:
            self.certificate.traffic.start()  # continue counting

    @property
    def saved_to(self) -> str | None:
        """The folder that holds the state after ``progress.iteration`` steps; None if it is not saved."""
        saved = self.saver is not None and self.saved_iteration == self.progress.iteration
        return self.config.save if saved else None

    def poll(self) -> None:
        """Raise the error of a failed background save; called once per step."""
        if self.saver is not None:
            self.saver.poll()

    def close(self) -> None:
        """Wait for a background save."""
        if self.saver is not None:
            self.saver.finish_save()

    def flags_to_go_back(self) -> str | None:
        """Flags that load this run's newest checkpoint before its last update; None if there is none."""
        resumed = None if self.config.finetune else self.config.load
        for folder in filter(None, (self.config.save, resumed)):
            iteration = newest_before(saved_iterations(Path(folder)), self.progress.last_update)
            if iteration is not None:
                step = f"--ckpt-step {iteration}"
                return step if self.run_config.islands.several else f"--load {folder} {step}"
        return None

    def load(self, saved: SavedRun, islands: Sequence[str] = (), reads_data: bool = True) -> None:
        """Restore a checkpoint of ``--load``.

        Args:
            saved: the checkpoint.
            islands: folders of all islands that saved it, this island's folder last; empty if the islands are still
                the same.
            reads_data: False to check only whether it can be loaded; the engines cannot be used afterwards.

        Raises:
            UserError: on every rank, before anything has changed, when the checkpoint cannot be used.
        """
        root = self.config.load
        assert root is not None
        try:
            self._restore(root, saved, islands, reads_data)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            common_file = checkpoint_folder(Path(root), saved.iteration) / COMMON
            raise UserError(f"{common_file} does not fit this run: {error!r}") from error
        self.log(f"loaded the checkpoint of iteration {saved.iteration} from {root}")

    def load_pretrained(self, root: str, iteration: Iteration) -> None:
        """Load a language model's weights under a new task head. Every rank calls this.

        If the head has a pooler, it starts from BERT's pooler, which has learned to summarize a whole sample. fp32
        weights are used if the checkpoint has them.

        Raises:
            UserError: on every rank, before anything has changed, when the checkpoint cannot be used.
        """
        saved = run_together(self.group, lambda: saved_shapes(root, iteration, ""))
        has_main = any(name.startswith(MAIN) for name in saved)
        tensors = {}
        for name, shard in self._weights(has_main).items():
            saved_name = name.replace(HEAD_POOLER, PRETRAINED_POOLER)
            if not name.startswith((MODEL + TASK_HEAD, MAIN + TASK_HEAD)) or saved_name in saved:
                tensors[saved_name] = shard
        weights = MAIN if has_main else MODEL
        language_heads = ("lm_head.", "binary_head.", "output_layer.")

        def unused(name: str) -> bool:
            return not name.startswith(weights) or name.removeprefix(weights).startswith(language_heads)

        load_tensors(root, iteration, tensors, self.group, allow_unexpected=unused, log=self.log)
        self._sync_weights(has_main)
        self.log(f"loaded the language model of iteration {iteration} from {root}; its head is new")

    def _restore(self, root: str, saved: SavedRun, islands: Sequence[str], reads_data: bool) -> None:
        optimizer, iteration, common = self.engines.optimizer, saved.iteration, saved.common
        weights_only = self.config.loads_weights_only
        if not weights_only:
            self.stateful_parts.check_names(common)
            check_optimizer(root, iteration, self.run_config, self.group)
        has_main = saved.common["separate_main"]
        if weights_only:  # a checkpoint of weights alone lacks fp32 values, even if its run had them
            has_main = bool(run_together(self.group, lambda: saved_shapes(root, iteration, MAIN)))
        tensors = self._weights(has_main)
        if self.config.moe_use_upcycling:
            check_dense(root, iteration, self.group)
            tensors = map_to_dense_names(tensors)
        if not weights_only:
            optimizer_shards = optimizer_tensors(optimizer)
            tensors |= {name: shard for name, shard in optimizer_shards.items() if not name.startswith(MAIN)}
            tensors |= self._outer_shards(root, iteration, common)
            tensors |= self._delayed_shards(Values(common["delayed_gradients"], self.config.source), iteration)
        weights = MAIN if has_main else MODEL
        ignored_prefixes = (
            PREFIX,
            OUTER,
            DELAYED,
            *([OPTIMIZER] if weights_only else []),
            *([MODEL] if has_main else []),
        )

        def unused(name: str) -> bool:
            return name.startswith(ignored_prefixes) and not name.startswith(weights)

        sections = run_together(self.group, lambda: saved_sections(root, iteration))
        differing = differing_flags(self.run_config.model, sections.get("model", {}), self.config.moe_use_upcycling)
        load = partial(load_tensors, root, iteration, tensors, self.group, log=self.log)
        load(allow_unexpected=unused, differing=differing.keys(), reads_data=reads_data)
        self._sync_weights(has_main)
        if reads_data and not weights_only:
            self._load_compressors(islands or (root,), iteration)
        scope_flags = {
            Scope.OPTIMIZER: not weights_only,
            Scope.SCHEDULE: not self.config.finetune and not self.config.no_load_lr_state,
            Scope.POSITION: not self.config.finetune,
            Scope.LOGS: not self.config.finetune,
        }
        self.stateful_parts.load_state_dict(common, [scope for scope, enabled in scope_flags.items() if enabled])
        if optimizer.publisher.look_ahead is not None:
            optimizer.publisher.publish_ahead()
        if differing:
            ours, theirs = (", ".join(words) for words in zip(*differing.values(), strict=True))
            self.log(
                f"warning: this run's model has {ours}; that of {self.config.source} has {theirs}. Its weights are "
                "taken all the same; --use-checkpoint-args takes its flags, too"
            )
        if not self.config.finetune:
            for line in sample_warnings(self.run_config, sections, self.progress.consumed_samples):
                self.log(line)

    def _load_compressors(self, folders: Sequence[str], iteration: Iteration) -> None:
        """Load the compressors' states of one island, or of several, whose outer residuals are averaged: the mean over
        the islands then stays the same, however many islands go on."""
        states = [] if self.engines.outer is None else list(self.engines.outer.states())
        means: dict[int, Tensor] = {}
        for folder in folders:
            self.compressors.load(folder, iteration, self.group, self.log)
            for number, state in enumerate(states if len(folders) > 1 else ()):
                residual = state.tensors.pop(RESIDUAL, None)
                if residual is not None:
                    share = residual / len(folders)
                    means[number] = means[number] + share if number in means else share
        for number, mean in means.items():
            states[number].tensors[RESIDUAL] = mean

    def _delayed_shards(self, saved: Values, iteration: Iteration) -> dict[str, LogicalShard]:
        """Shards of delayed gradients, allocated if the checkpoint has them."""
        delayed, in_flight = self.engines.delayed, saved.has("iteration")
        if delayed is None:
            if in_flight:
                self.log(f"the gradients of iteration {iteration} are never applied, since --delay is 0 now")
            return {}
        previous, correction = None, delayed.correction
        if correction is not None and saved.text("previous", "") == correction.name:
            previous = correction.allocate_previous()
        elif correction is not None and in_flight:
            self.log(f"the first updates are without --delay-correction {correction.name}, which has no state yet")
        if not in_flight and iteration != 0:
            self.log("the first step makes no update, since the checkpoint has no gradients in flight for --delay 1")
        return delayed_tensors(self.engines.optimizer, previous, in_flight)

    def _outer_shards(self, root: str, iteration: Iteration, common: Mapping[str, Any]) -> dict[str, LogicalShard]:
        """Shards of the islands' round state, allocated if the checkpoint has it. Every rank calls this."""
        outer = self.engines.outer
        saved_names = run_together(self.group, lambda: saved_shapes(root, iteration, OUTER))
        if outer is None or not saved_names:
            if saved_names:
                self.log("warning: the checkpoint's anchor of islands has no place in this run and is left out")
            return {}
        outer.outer.copy_params()
        flight, fragments = common["outer"]["flight"], common["outer"].get("fragments", outer.options.fragments)
        if flight is not None:
            if fragments != outer.options.fragments:
                raise UserError(
                    f"--load {root}: a fragment was on its way at its iteration, one of fragments={fragments}; go on "
                    "with as many, or load a checkpoint at which none was"
                )
            outer.load_state_dict(common["outer"])
            outer.allocate_buffers(flight["fragment"])
        return {name: shard for name, shard in outer_tensors(outer).items() if name in saved_names}

    def _weights(self, has_main: bool) -> dict[str, LogicalShard]:
        """This rank's weights as shards, by their names in the checkpoint.

        Args:
            has_main: whether the checkpoint holds the optimizer's fp32 values beside a model of lower precision.
        """
        model, optimizer = model_tensors(self.engines.stages), self.engines.optimizer
        if not has_main:
            return model
        # An fp32 model takes the fp32 values instead of the rounded weights.
        return main_tensors(optimizer) | (model if optimizer.separate_main else buffer_tensors(self.engines.stages))

    def _sync_weights(self, has_main: bool) -> None:
        """Copy loaded weights from the tensors of ``_weights`` to all other copies."""
        optimizer = self.engines.optimizer
        if optimizer.separate_main and not has_main:
            for shard in optimizer.shards:
                shard.main.copy_(shard.model)
        elif has_main and optimizer.sharded and not optimizer.separate_main:
            optimizer.publisher.gather()


def _stateful_parts(
    engines: Engines, schedule: LRSchedule, progress: Progress, log: Callable[[str], None]
) -> StatefulParts:
    """The stateful parts of a run: everything that a checkpoint holds other than tensors."""
    optimizer, controllers = engines.optimizer, engines.sync.controllers

    def set_runs(saved: Any) -> None:
        runs = saved.items() if isinstance(saved, dict) else ()
        progress.tracked_runs = {str(service): run for service, run in runs if isinstance(run, str)}

    stateful = StatefulParts()
    stateful.register("progress", progress, Scope.POSITION)
    stateful.register_value("tracked_runs", lambda: dict(progress.tracked_runs), set_runs, Scope.LOGS)
    stateful.register("schedule", schedule, Scope.SCHEDULE)
    stateful.register("loss_scale", optimizer.loss_scale, Scope.OPTIMIZER)
    set_steps = partial(setattr, optimizer, "steps")
    stateful.register_value("optimizer_steps", lambda: optimizer.steps, set_steps, Scope.OPTIMIZER)
    set_frozen_at = partial(setattr, optimizer, "frozen_at")
    stateful.register_value("variance_frozen_at", lambda: optimizer.frozen_at, set_frozen_at, Scope.OPTIMIZER)
    stateful.register("outer", engines.outer, Scope.OPTIMIZER)
    stateful.register("delayed_gradients", engines.delayed, Scope.OPTIMIZER)
    stateful.register_value("separate_main", lambda: optimizer.separate_main, None, Scope.DESCRIPTION)
    stateful.register("expert_loads", engines.experts, Scope.OPTIMIZER)
    stateful.register_value(
        "controllers", controllers.state_dict, lambda saved: controllers.load_state_dict(saved, log), Scope.OPTIMIZER
    )
    return stateful
