"""Training steps of a pipeline that is not flushed between steps (``--no-pipeline-flush``).

A step ends before its last backward passes, which follow the first forward passes of the next step. During that next
step, the gradients are completed, checked to be finite on all ranks, and reduced over replicas, and the update at its
end applies them. So every gradient is applied one step late, as with every other layout under ``--delay 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron.compression.state import end_states
from megatron.data.batch import Batch
from megatron.optimizer.step_summary import PendingSummary, StepSummary, StopVotes
from megatron.parallel.data.delayed import DelayedGradients, OpenStep, StepOutcome
from megatron.parallel.data.gradient_sync import ReducedGradients
from megatron.parallel.pipeline.timetable import Timetable
from megatron.training.assembly import Engines
from megatron.training.chunk_program import begin_passes, make_metrics, pipeline_span, report_losses
from megatron.training.metrics import StepMetrics
from megatron.training.timers import Timers


def step_without_flush(
    engines: Engines,
    batches: Sequence[Batch],
    iteration: int,
    lr: float,
    weight_decay: float,
    decoupled_lr: float | None,
    votes: StopVotes,
    timers: Timers,
    length: int,
) -> StepMetrics:
    """Run a training step up to the update with the last step's gradients; see ``train_step``.

    The losses in the returned metrics are empty until the next step or ``flush_pipeline`` fills them in. If a step's
    gradients are not finite, the next step counts as skipped.
    """
    delayed, ledger = engines.delayed, engines.ledger
    assert delayed is not None
    assert delayed.versions is not None
    last = delayed.open_step
    if last is not None and (last.num_micro_batches, last.seq_length) != (len(batches), length):
        flush_pipeline(engines, timers)
        last = None
    scale = engines.optimizer.loss_scale.scale
    table, programs, loss_grad = begin_passes(engines, batches, iteration, length)
    delayed.versions.begin_step(iteration)
    update = _UpdateCommunication(engines, delayed, table, votes)
    with timers("forward-backward", level=1):
        engines.pipeline.run_without_flush(
            table,
            programs,
            iteration,
            loss_grad,
            update.after_forwards,
            pipeline_span(timers, ledger),
            scale,
        )
    delayed.versions.select(None)
    summary, gradients = update.finish()
    if gradients is not None:
        engines.plan.begin_step(gradients.iteration)
    with ledger.computing(), timers("optimizer", level=1), ledger.span("optimizer"):
        totals = engines.optimizer.step(summary, gradients, lr, weight_decay, decoupled_lr, delayed=True)
    updated = totals.grad_norm is not None
    if gradients is not None and gradients.needs_update and updated:
        engines.sync.observe_update()
    delayed.end_step(updated)
    if engines.channel is not None:
        end_states(engines.channel.forward.states(), keep=True)
    for observer in ledger.observers:
        observer.end_step()
    losses = partial(report_losses, engines, programs[-1])
    delayed.open_step = OpenStep(iteration, len(batches), length, scale, losses)
    totals = replace(totals, finite=totals.finite and delayed.last_outcome.usable)
    engines.plan.steps.skipped += not totals.finite
    metrics = replace(make_metrics(engines, totals, iteration, len(batches), length), losses=delayed.open_step.losses)
    if last is not None and not delayed.last_outcome.finite:
        # Messages of the last step have left state in the codecs that is not finite, and this step's messages used it.
        flush_pipeline(engines, timers)
        _reset_codecs(engines)
    return metrics


def flush_pipeline(engines: Engines, timers: Timers) -> None:
    """Run the backward passes that the last step has left, and launch the reduction of its gradients.

    A collective call, necessary before evaluations, saves and anything else that uses the communication points or the
    parameters.
    """
    delayed = engines.delayed
    if delayed is None or delayed.open_step is None or delayed.versions is None:
        return
    with timers("forward-backward", level=1):
        engines.pipeline.flush(pipeline_span(timers, engines.ledger))
    delayed.versions.select(None)
    summary = _complete_gradients(engines, delayed).all_reduce(engines.topology, engines.ledger, engines.sync_warmup)
    _record_outcome(delayed, delayed.open_step, summary)
    _launch(engines, delayed, usable=delayed.last_outcome.usable)
    if not delayed.last_outcome.finite:
        _reset_codecs(engines)


def complete_steps(engines: Engines, timers: Timers) -> None:
    """Flush the pipeline, and finish the reduction of delayed gradients. A collective call.

    Call it before work that is not part of a step, so that the traffic of steps is not counted as that of this work,
    and compressors have their states.
    """
    flush_pipeline(engines, timers)
    if engines.delayed is not None:
        engines.delayed.finish_reduction()


class _UpdateCommunication:
    """Communication for the update at a step's end, which runs between the step's passes.

    Each rank takes part after a number of forward passes that all ranks complete at about the same time. Later stages
    complete fewer: while a stage waits for the first message from the stages after it, those run backward passes, which
    take twice as long as forward passes. Ranks wait for a result only after further passes, since small messages queue
    behind those of the pipeline.

    Args:
        engines, delayed: engines of this rank.
        table: operations of all pipeline stages.
        votes: this rank's requests to stop.
    """

    def __init__(self, engines: Engines, delayed: DelayedGradients, table: Timetable, votes: StopVotes) -> None:
        self._engines, self._delayed, self._votes = engines, delayed, votes
        longest, self._complete_at = table.warm_ups[0], table.warm_ups[engines.pipeline.stage]
        num_forwards = sum(op.is_forward for op in table.schedules[0])
        fewer_forwards = math.ceil((longest - self._complete_at) / 3)
        step, has_replicas = delayed.open_step, any(buffer.group.size > 1 for buffer in engines.buffers)
        agrees = step is not None and engines.sync.needs_finite(step.iteration)
        self._launch_at = min(longest + 1, num_forwards) - fewer_forwards if agrees else self._complete_at
        reduce_at = (longest + 1 + num_forwards) // 2 if has_replicas else longest
        self._reduce_at = max(reduce_at - fewer_forwards, self._launch_at)
        self._agrees = agrees
        self._step: OpenStep | None = None
        self._completed = StepSummary()
        self._agreement: PendingSummary | None = None
        self._gradients: ReducedGradients | None = None
        self._pending: PendingSummary | None = None

    def after_forwards(self, number: int) -> None:
        """Communicate, if due, after a number of this step's forward passes."""
        engines, delayed, step = self._engines, self._delayed, self._delayed.open_step
        if number == self._complete_at:
            if step is not None:
                self._step, self._completed = step, _complete_gradients(engines, delayed)
                if self._agrees:
                    self._agreement = self._completed.start_all_reduce(
                        engines.topology, engines.ledger, engines.sync_warmup
                    )
                else:
                    _launch(engines, delayed, usable=True)
            with engines.ledger.computing():
                for buffer in engines.buffers:
                    buffer.begin_grads()
        if number == self._launch_at and self._agreement is not None:
            _launch(engines, delayed, usable=self._agreement.wait().usable)
        if number == self._reduce_at:
            with engines.ledger.computing():
                self._gradients = delayed.take_gradients()
            summary = engines.optimizer.summarize(self._completed, self._gradients, self._votes)
            self._pending = summary.start_all_reduce(engines.topology, engines.ledger, engines.sync_warmup)

    def finish(self) -> tuple[StepSummary, ReducedGradients | None]:
        """Wait for the sums over all ranks; return them, and the gradients if they may be applied."""
        assert self._pending is not None
        summary = self._pending.wait()
        delayed = self._delayed
        if self._step is not None:
            _record_outcome(delayed, self._step, summary)
        last = delayed.last_outcome
        # An overflow under an earlier, larger scale says nothing of the present one.
        overflows = not last.finite and last.loss_scale <= self._engines.optimizer.loss_scale.scale
        summary = replace(summary, not_finite=float(overflows))
        return summary, self._gradients if last.usable else None


def _complete_gradients(engines: Engines, delayed: DelayedGradients) -> StepSummary:
    """Complete the open step's gradients after its last backward; return its losses and whether they are finite."""
    assert delayed.open_step is not None
    if engines.channel is not None:
        end_states(engines.channel.backward.states(), keep=True)
    with engines.ledger.computing():
        not_finite = 1.0 - float(delayed.complete_gradients())
    return StepSummary(delayed.open_step.report_losses(), not_finite=not_finite)


def _reset_codecs(engines: Engines) -> None:
    """Reset the codecs of pipeline messages."""
    if engines.channel is not None:
        engines.channel.reset_states()


def _launch(engines: Engines, delayed: DelayedGradients, *, usable: bool) -> None:
    """Launch the reduction of the open step's gradients, if they are usable."""
    step = delayed.open_step
    assert step is not None
    with engines.ledger.computing():
        delayed.launch_reduction(step.iteration, step.loss_scale, usable=usable)
    delayed.open_step = None


def _record_outcome(delayed: DelayedGradients, step: OpenStep, summary: StepSummary) -> None:
    """Fill in the losses of a step, and note whether its gradients may be applied."""
    step.losses.update(summary.mean_losses)
    delayed.last_outcome = StepOutcome(step.loss_scale, not summary.not_finite, summary.usable)
