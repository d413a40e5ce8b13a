"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from megatron.data.build import Dataset
from megatron.data.loader import MicroBatches
from megatron.diloco.rounds import Rounds
from megatron.diloco.startup import QuorumError
from megatron.distributed.errors import CommunicationError
from megatron.distributed.topology import Topology
from megatron.optimizer.step_summary import ExitReason, StepSummary, StopVotes
from megatron.training.assembly import Engines
from megatron.training.compressor_probe import CompressorProbe
from megatron.training.divergence import DivergenceCheck
from megatron.training.evaluation import EvaluationSet, evaluate
from megatron.training.flushless import complete_steps
from megatron.training.loss_guard import LossGuard
from megatron.training.metrics import Evaluation, StepMetrics
from megatron.training.persistence import RunCheckpoints
from megatron.training.program import DivergedError, NothingLearnedError
from megatron.training.replica_check import check_replicas
from megatron.training.report import Reporter
from megatron.training.run_plan import RunPlan
from megatron.training.schedule_choice import ScheduleChoice
from megatron.training.signals import ExitPolicy, ExitSignals
from megatron.training.step import open_loader, take_batches, train_step


class Trainer:
    """Training loop of a run. Every rank has an instance and calls ``run``.

    Args:
        engines: this rank's model, pipeline and optimizer.
        plan: steps and data of the run.
        checkpoints: checkpoints of the run, with its counters and learning-rate schedule.
        reporter: logs of the run.
        rounds: rounds of islands; None without the point ``outer``.
        loss_guard: checks of compressors that the run has chosen; None without any.
    """

    def __init__(
        self,
        engines: Engines,
        plan: RunPlan,
        checkpoints: RunCheckpoints,
        reporter: Reporter,
        rounds: Rounds | None = None,
        loss_guard: LossGuard | None = None,
    ) -> None:
        self.config = config = engines.config
        self.rounds, self.loss_guard = rounds, loss_guard
        self.train_iters, self.score_outputs = plan.train_iters, plan.score_outputs
        self._scored_at: int | None = None
        self.engines, self.sizes = engines, plan.sizes
        self.topology: Topology = engines.topology
        self.train_set, self.valid_sets, self.test_sets = plan.train_set, plan.valid_sets, plan.test_sets
        self.progress, self.schedule = checkpoints.progress, checkpoints.schedule
        self.checkpoints, self.reporter, self.timers = checkpoints, reporter, reporter.timers
        self.schedule_choice = ScheduleChoice(engines) if ScheduleChoice.is_needed(engines) else None
        self.divergence = DivergenceCheck(config.training, self.progress, CompressorProbe(engines))
        self._unreported: StepMetrics | None = None  # of the last step, while some of its backward passes have not run
        self.policy = ExitPolicy(config.training, plan.started)

    def run(self) -> ExitReason:
        """Train (unless ``--skip-train``), save, and evaluate; return the reason to stop before the last iteration.

        Raises:
            NothingLearnedError: on every rank, at the end, if every step was skipped.
            DivergedError: on every rank, if the run has diverged.
        """
        reason, start, skipped = ExitReason.NONE, self.progress.iteration, self.progress.skipped
        if not self.config.validation.skip_train:
            round_due = self.rounds is not None and self.rounds.is_round_overdue(start)
            if start < self.train_iters or self._left_behind or round_due:
                reason = self._train()
            else:
                flags = "--epochs" if self.score_outputs else "--train-iters, --train-samples or --train-tokens"
                self.reporter.line(
                    f"nothing is left to train or to save: the run is at iteration {start} of {self.train_iters}; "
                    f"raise {flags} to go on"
                )
        if reason is ExitReason.NONE:
            for split, sets in (("validation", self.valid_sets), ("test", self.test_sets)):
                if sets and self._scored_at != self.progress.iteration:
                    self._evaluate(sets, 0, split, final=True)
        self.checkpoints.close()
        if reason is ExitReason.DIVERGED:
            raise DivergedError(self.divergence.explain(self.checkpoints.flags_to_go_back()))
        if reason is ExitReason.NONE and self.rounds is not None:
            self.rounds.finish(self.progress.iteration)
        if reason is not ExitReason.NONE:
            self.reporter.line(self.policy.explain(reason, self.progress.iteration, self.checkpoints.saved_to))
        elif not self.config.validation.skip_train:
            self._check_learned(start, skipped)
        return reason

    def _check_learned(self, start_iteration: int, skipped_before: int) -> None:
        """Check that not all steps were skipped, apart from those of --iterations-to-skip.

        Raises:
            NothingLearnedError: when every step of this process, or every step of the run, was skipped.
        """
        done, delayed = self.progress.iteration, self.engines.delayed
        # Without a flush, the step after a failed step counts as skipped.
        failed_last = delayed is not None and not delayed.last_outcome.usable
        for start, before in ((start_iteration, skipped_before), (0, 0)):
            requested = self.sizes.skipped.count(start, done)
            steps, skipped = done - start - requested, self.progress.skipped - before - requested
            if steps and skipped + (failed_last and start == 0) == steps:
                raise NothingLearnedError(
                    f"nothing was learned: all {steps} steps were skipped, since gradients were not finite or no token "
                    "counted; lower --lr or --initial-loss-scale, train longer, or use --bf16"
                )

    def _train(self) -> ExitReason:
        assert self.train_set is not None
        config, progress, reason = self.config, self.progress, ExitReason.NONE
        listening = ExitSignals() if config.training.exit_signal_handler else nullcontext()
        with listening as signals:
            self.reporter.start_training()
            if self.checkpoints.certificate is not None:
                statements = self.checkpoints.certificate_record.statements
                self.checkpoints.certificate.begin(progress.iteration, statements)
            if self.schedule.lr == 0.0 < self.schedule.values.max_lr and progress.iteration == 0:
                self.reporter.line("note: the warm-up begins at a learning rate of 0: iteration 1 changes no weight")
            # Join other islands, or run the round that is due after the checkpoint's iteration.
            if self._left_behind:
                self._join()
            if self.rounds is not None:
                self._run_round(lambda rounds: rounds.catch_up(self.progress.iteration))
            if self.config.validation.eval_at_start and progress.iteration == 0:
                self._validate()
            if self.loss_guard is not None and self.loss_guard.due_at_start:
                self._check_loss()
            while reason is ExitReason.NONE and (self._left_behind or progress.iteration < self.train_iters):
                if self._left_behind:
                    self._join()
                elif self._skips_next:
                    reason = self._skip_iterations(signals)
                else:
                    with self._make_loader(self.train_set, progress.consumed_samples) as batches:
                        while self._may_continue(reason, self.train_iters) and not self._skips_next:
                            reason = self._run_iteration(batches, self._make_vote(signals))
            reason = max(reason, self._flush())
            self.reporter.report_window()
            if reason is ExitReason.DIVERGED:
                return reason
            with self.reporter.paused("save"):  # exit signals are deferred until the checkpoint is written
                self._save()
                self.checkpoints.close()
        if (skips := progress.consecutive_skips) > 1:
            self.reporter.line(f"warning: the last {skips} steps were skipped: the run may have diverged")
        return reason

    @property
    def _left_behind(self) -> bool:
        """Whether this island must join the others before the next step."""
        return self.rounds is not None and self.rounds.left_behind

    @property
    def _skips_next(self) -> bool:
        """Whether --iterations-to-skip contains the next iteration."""
        return self.progress.iteration + 1 in self.sizes.skipped

    def _may_continue(self, reason: ExitReason, last: int) -> bool:
        """Whether to go on: before iteration ``last``, without a reason to stop, and without other islands to join."""
        return self.progress.iteration < last and reason is ExitReason.NONE and not self._left_behind

    def _skip_iterations(self, signals: ExitSignals | None) -> ExitReason:
        """Skip iterations until the next step, the end of the run, or until this island must join the others."""
        first = self.progress.iteration + 1
        last = min(self.sizes.skipped.until(self.progress.iteration) or first, self.train_iters)
        skipped_text = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        self.reporter.line(f"--iterations-to-skip: {skipped_text} without a step; their samples count as consumed")
        reason = ExitReason.NONE
        while self._may_continue(reason, last):
            reason = self._skip_iteration(self._make_vote(signals))
        return reason

    def _skip_iteration(self, votes: StopVotes) -> ExitReason:
        """Count the samples of an iteration as consumed without a step, and do all other work that is due."""
        if (reason := self._flush()) is not ExitReason.NONE:
            return reason
        done, engines = self.progress.iteration, self.engines
        if self.rounds is not None:
            self.rounds.before_step(done)
        engines.sync_warmup.begin_step(done)
        with engines.ledger.uncounted():
            votes = StepSummary(votes=votes).all_reduce(engines.topology, engines.ledger, engines.sync_warmup).votes
        self._count_iteration(step_taken=False)
        self.progress.skipped += 1
        self.reporter.report_if_due(done + 1)
        if self.rounds is not None:
            self.rounds.stop_request = max(self.rounds.stop_request, self.policy.reason(votes))
            self._run_round(lambda rounds: rounds.after_step(done + 1, math.nan))
        return ExitReason.NONE if self._left_behind else self._after_step(votes)

    def _count_iteration(self, step_taken: bool = True) -> None:
        """Count the next iteration and its samples, and its tokens if a step was taken."""
        progress = self.progress
        size, length = self.sizes.batches.at(progress.consumed_samples), self.sizes.lengths.at(progress.iteration)
        progress.consumed_tokens = progress.tokens(self.config.model.seq_length) + size * length * step_taken
        progress.iteration += 1
        progress.consumed_samples += size

    def _join(self) -> None:
        """Join the other islands.

        Raises:
            CommunicationError: when they have ended.
        """
        assert self.rounds is not None
        with self.reporter.paused("join"):
            if not self.rounds.join():
                raise CommunicationError("the other islands have ended; start all of them again from their checkpoints")

    def _run_round(self, run_round: Callable[[Rounds], None]) -> None:
        """Run a round of islands; if fewer islands than the quorum remain, save a checkpoint before the run ends."""
        assert self.rounds is not None
        try:
            run_round(self.rounds)
        except QuorumError:
            self.rounds.drop_in_flight()
            with self.reporter.paused("save"):
                self.checkpoints.save()
                self.checkpoints.close()
            raise

    def _save(self) -> None:
        """Save a checkpoint."""
        if self.rounds is not None and self.checkpoints.saver is not None:
            self._run_round(Rounds.finish_transfer)
        self.checkpoints.save()

    def _make_vote(self, signals: ExitSignals | None) -> StopVotes:
        """Make this rank's vote to stop after the next iteration."""
        needs_choice = self.reporter.needs_choice and self.progress.iteration + 1 < self.train_iters
        return self.policy.vote(signals is not None and signals.received is not None, needs_choice)

    def _run_iteration(self, batches: MicroBatches, votes: StopVotes) -> ExitReason:
        """Run a training step and the work that is due after it."""
        config, progress, timers = self.config, self.progress, self.timers
        size = self.sizes.batches.at(progress.consumed_samples)
        count = self.sizes.batches.num_micro_batches(progress.consumed_samples)
        length = self.sizes.lengths.at(progress.iteration)
        with timers("batch-generator", level=1):
            step_batches = take_batches(batches, count, self.topology.device, length)
        if self.rounds is not None:
            self.rounds.before_step(progress.iteration)
        if self.loss_guard is not None:
            self.loss_guard.begin_step(progress.iteration)
        if self.checkpoints.certificate is not None:
            self.checkpoints.certificate.begin_step(progress.iteration)
        rates = self.schedule.rates
        metrics = train_step(
            self.engines, step_batches, progress.iteration, *rates, votes=votes, timers=timers, seq_length=length
        )
        self._count_iteration()
        if self.schedule_choice is not None and self.schedule_choice.is_due:
            complete_steps(self.engines, timers)  # their messages would take a part of the links
            with self.reporter.paused("schedule"):
                self.schedule_choice.decide(count, length, self.reporter.line)
        if not metrics.skipped:
            self.schedule.step(size, size * length)
        assert self.train_set is not None
        epoch_samples = self.train_set.epoch_samples
        metrics = replace(
            metrics,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.tokens(config.model.seq_length),
            epoch=progress.consumed_samples / epoch_samples if epoch_samples else None,
            curriculum_seqlen=length if config.curriculum.curriculum_learning else None,
            learning_rate=rates.lr,
            weight_decay=rates.weight_decay,
            decoupled_learning_rate=rates.decoupled_lr,
        )
        completed: StepMetrics | None = metrics
        if config.parallel.overlaps_steps:
            completed, self._unreported = self._unreported, metrics
        warning = None if completed is None else self.divergence.after_step(completed)
        diverged = self.divergence.problem is not None
        if self.rounds is not None and not diverged:
            self.rounds.stop_request = max(self.rounds.stop_request, self.policy.reason(metrics.votes))
            self._run_round(lambda rounds: rounds.after_step(progress.iteration, metrics.loss))
            if self._left_behind:
                return ExitReason.NONE
        if self.checkpoints.certificate is not None:
            self.checkpoints.certificate.end_step()
        self.checkpoints.poll()
        if completed is not None:
            self.reporter.after_step(completed)
        if warning is not None:
            self.reporter.line(warning)
        return ExitReason.DIVERGED if diverged else self._after_step(metrics.votes)

    def _flush(self) -> ExitReason:
        """Complete the last step, and report it if that is left to do; return DIVERGED if the run has diverged."""
        complete_steps(self.engines, self.timers)
        if self._unreported is not None:
            metrics, self._unreported = self._unreported, None
            warning = self.divergence.after_step(metrics)
            self.reporter.after_step(metrics)
            if warning is not None:
                self.reporter.line(warning)
        return ExitReason.NONE if self.divergence.problem is None else ExitReason.DIVERGED

    def _after_step(self, votes: StopVotes) -> ExitReason:
        """Check, evaluate and save if due after a step; return the reason to stop now.

        Args:
            votes: requests of all ranks to stop.
        """
        config, progress, timers = self.config, self.progress, self.timers
        exit_interval, replica_interval = config.training.exit_interval, config.training.check_replicas
        eval_interval, save_interval = config.validation.eval_interval, config.checkpoint.save_interval
        checks_loss = self.loss_guard is not None and self.loss_guard.is_due(progress.iteration)
        is_due = any(n and progress.iteration % n == 0 for n in (eval_interval, replica_interval, save_interval))
        if (checks_loss or is_due) and (reason := self._flush()) is not ExitReason.NONE:
            return reason
        if replica_interval and progress.iteration % replica_interval == 0:
            with self.reporter.paused("check"):
                check_replicas(self.engines, progress.iteration)
        if checks_loss:
            self._check_loss()
        if progress.iteration % eval_interval == 0:
            self._validate()
        if self.rounds is not None and self.rounds.takes_local_steps:
            reason = ExitReason(self.rounds.stop_reason)  # such islands stop together at the end of a round
        else:
            reason = self.policy.reason(votes)
        if exit_interval and progress.iteration % exit_interval == 0:
            reason = max(reason, ExitReason.INTERVAL)  # rather than a pause to choose compressors
        if save_interval and progress.iteration % save_interval == 0:
            with self.reporter.paused("save"), timers("save-checkpoint"):
                self._save()
        return reason

    def _check_loss(self) -> None:
        """Check the loss increase due to the compressors that the run has chosen."""
        assert self.loss_guard is not None
        with self.reporter.paused("check"):
            finding = self.loss_guard.check(self.progress.iteration)
        self.reporter.record(finding, self.progress.iteration)
        if finding.line is not None and self.reporter.step_time_check is not None:  # a compressor has changed
            self.reporter.step_time_check.restart()

    def _make_loader(self, dataset: Dataset, consumed: int) -> MicroBatches:
        workers = self.config.data.num_workers
        return open_loader(self.engines, dataset, consumed, num_workers=workers, trains=dataset is self.train_set)

    def _evaluate(self, sets: Sequence[EvaluationSet], first_batch: int, split: str, *, final: bool = False) -> None:
        """Evaluate data sets, with the scheduled options of the last iteration, and report their losses and the mean.

        Args:
            sets: data sets to evaluate.
            first_batch: index of the first global batch in each set.
            split: "validation" or "test".
            final: whether this is an evaluation after training, with the number of samples in the report.
        """
        losses: dict[str, Mapping[str, float]] = {}
        scores: Mapping[str, Mapping[str, float]] = {}
        self.engines.plan.begin_step(self.progress.iteration - 1)  # also after a load, or a skipped iteration
        for evaluation_set in sets:
            count = evaluation_set.batch_size // (self.config.training.micro_batch_size * self.topology.dp.size)
            first = first_batch * evaluation_set.batch_size
            with self._make_loader(evaluation_set.dataset, first) as batches:
                evaluation = evaluate(self.engines, batches, evaluation_set.num_batches, count, first)
            losses[evaluation_set.name] = evaluation.losses
            if self.score_outputs is not None and evaluation.outputs_nc is not None:
                scores = self.score_outputs(evaluation.outputs_nc)
                self._scored_at = self.progress.iteration
        names = next(iter(losses.values()))
        means = {name: sum(set_losses[name] for set_losses in losses.values()) / len(losses) for name in names}
        self.reporter.sinks.evaluation(
            Evaluation(
                iteration=self.progress.iteration,
                consumed_samples=self.progress.consumed_samples,
                losses=means,
                samples=sum(evaluation_set.samples for evaluation_set in sets) if final else None,
                split=split,
                scores=scores,
                sets=losses if len(sets) > 1 else {},
            )
        )

    def _validate(self) -> None:
        """Evaluate between training steps, on the next validation samples or always on the same samples."""
        validation = self.config.validation
        if not self.valid_sets:
            return
        same = self.score_outputs is not None or validation.full_validation or validation.fixed_validation
        earlier_evaluations = 0 if same else max(self.progress.iteration // validation.eval_interval - 1, 0)
        with self.reporter.paused("evaluate"), self.timers("evaluate"):
            self._evaluate(self.valid_sets, earlier_evaluations * validation.eval_iters, "validation")
