"""The training step and the evaluation step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from megatron.data.batch import Batch
from megatron.data.loader import MicroBatches
from megatron.data.source import SampleSource
from megatron.optimizer.step_summary import NO_VOTES, StepSummary, StopVotes
from megatron.training.assembly import Engines
from megatron.training.chunk_program import (
    ChunkProgram,
    batch_shapes,
    begin_passes,
    expert_signatures,
    launch_signatures,
    make_metrics,
    pipeline_span,
    report_losses,
)
from megatron.training.flushless import step_without_flush
from megatron.training.metrics import StepMetrics
from megatron.training.timers import Timers


def open_loader(
    engines: Engines, dataset: SampleSource, consumed_samples: int, *, num_workers: int = 0, trains: bool = False
) -> MicroBatches:
    """Open this rank's micro-batches of a data set; close them after use.

    Args:
        engines: engines of this rank.
        dataset: the data set.
        consumed_samples: draws consumed by all ranks.
        num_workers: threads that prefetch.
        trains: whether islands divide the samples, as in training; in evaluation each island reads all of them.
    """
    dp, islands = engines.topology.dp, engines.config.islands
    return MicroBatches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=engines.config.training.micro_batch_size,
        dp_rank=dp.rank,
        dp_size=dp.size,
        num_workers=num_workers,
        needs_tokens=engines.needs_tokens,
        island=islands.island or 0 if trains else 0,
        islands=islands.islands if trains else 1,
    )


def take_batches(
    batches: Iterator[Batch], count: int, device: torch.device, seq_length: int | None = None
) -> list[Batch]:
    """Take the next ``count`` micro-batches and move them to the device.

    Args:
        batches: micro-batches of this rank.
        count: number of micro-batches.
        device: device for their tokens.
        seq_length: number of tokens to keep of each sample; None for all tokens.

    Raises:
        RuntimeError: when there are no more samples.
    """
    step_batches = [
        (batch if seq_length is None else batch.truncated(seq_length)).to(device) for batch in islice(batches, count)
    ]
    if len(step_batches) != count:
        raise RuntimeError(f"the data set ended after {len(step_batches)} of {count} micro-batches of a step")
    return step_batches


def count_micro_batches(engines: Engines) -> int:
    """Count this rank's micro-batches of a full global batch."""
    training = engines.config.training
    return training.global_batch_size // (training.micro_batch_size * engines.topology.dp.size)


def take_full_batch(engines: Engines, batches: MicroBatches) -> list[Batch]:
    """Take this rank's micro-batches of a full global batch, or all that are left, the same number on all ranks."""
    return take_batches(batches, min(count_micro_batches(engines), len(batches)), engines.topology.device)


def train_step(
    engines: Engines,
    batches: Sequence[Batch],
    iteration: int,
    lr: float,
    weight_decay: float,
    decoupled_lr: float | None = None,
    votes: StopVotes = NO_VOTES,
    timers: Timers | None = None,
    seq_length: int | None = None,
) -> StepMetrics:
    """Run a training step: forward and backward of all micro-batches, gradient reduction, update.

    Returns the metrics of the step, the same on every rank, without the samples and tokens consumed by the run.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        iteration: 0-based number of this step.
        lr, weight_decay, decoupled_lr: see ``Optimizer.step``.
        votes: this rank's request to stop.
        timers: timers of the step's phases.
        seq_length: tokens of each sample; None for the full length.
    """
    ledger, config = engines.ledger, engines.config
    length = seq_length or config.model.seq_length
    timers = timers or Timers(clock=ledger.clock)
    if engines.delayed is not None and engines.delayed.versions is not None:
        return step_without_flush(engines, batches, iteration, lr, weight_decay, decoupled_lr, votes, timers, length)
    with ledger.computing():
        for buffer in engines.buffers:
            buffer.begin_grads()
    table, programs, loss_grad = begin_passes(engines, batches, iteration, length)
    with timers("forward-backward", level=1):
        engines.pipeline.run(
            table,
            programs,
            iteration,
            loss_grad,
            launch_signatures(engines, batches, length),
            pipeline_span(timers, ledger),
            engines.optimizer.loss_scale.scale,
        )
    reduction = "grads-reduce-scatter" if engines.optimizer.sharded else "grads-all-reduce"
    delayed, loss_scale = engines.delayed, engines.optimizer.loss_scale.scale
    with ledger.computing(), timers(reduction, level=1):
        losses = report_losses(engines, programs[-1])
        not_finite = 0.0
        if delayed is not None:
            not_finite = 1.0 - float(delayed.complete_gradients())
            gradients = delayed.take_gradients()
        else:
            gradients = engines.sync.reduce_gradients(sum(count for _, count in losses.values()))
        sync_warmup = engines.sync_warmup
        if gradients is not None and gradients.finite and sync_warmup.active and sync_warmup.compressed:
            assert engines.outer is not None
            assert sync_warmup.group is not None
            with sync_warmup.explain_errors():
                engines.outer.sum_gradients(sync_warmup.group, iteration, loss_scale)
    with ledger.computing(), timers("optimizer", level=1), ledger.span("optimizer"):
        local_summary = engines.optimizer.summarize(StepSummary(losses, not_finite=not_finite), gradients, votes)
        summary = local_summary.all_reduce(engines.topology, ledger, sync_warmup)
        totals = engines.optimizer.step(summary, gradients, lr, weight_decay, decoupled_lr, delayed=delayed is not None)
    updated = totals.grad_norm is not None
    if gradients is not None and gradients.needs_update and updated:
        engines.sync.observe_update()
    if delayed is None:
        engines.sync.end_step(keep_states=updated)
    else:
        with ledger.computing(), timers(reduction, level=1):
            delayed.end_step(updated)
            delayed.launch_reduction(iteration, loss_scale, usable=totals.usable)
    expert_losses, loads = engines.experts.finish_step(len(batches), totals.usable)
    engines.plan.steps.skipped += totals.skipped
    engines.end_step(keep_states=totals.usable)
    return replace(
        make_metrics(engines, totals, iteration, len(batches), length),
        losses={**totals.losses, **expert_losses},
        expert_loads=loads,
        skipped_iterations=int(totals.skipped),
    )


@torch.no_grad()
def evaluation_step(
    engines: Engines, batches: Sequence[Batch], outputs: list[tuple[Tensor, Tensor]] | None = None
) -> dict[str, tuple[float, float]]:
    """Run the forward pass of some micro-batches without dropout.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        outputs: list to which the reporting rank appends each micro-batch's task-head output and draw ids.

    Returns:
        Sum in nats and count of each loss over this rank's samples, by name; zero on ranks that do not report (other
        stages and tensor-parallel ranks).
    """
    length = engines.config.model.seq_length
    engines.begin_step(-1, length)
    programs = [ChunkProgram(stage, batches, None, engines) for stage in engines.stages]
    table = engines.pipeline.get_timetable(None, len(batches))
    signatures = [("evaluation", len(batches), length, batch_shapes(batches)), *engines.comm.launch_signature(length)]
    signatures += expert_signatures(engines)
    engines.pipeline.run(table, programs, -1, None, signatures)
    engines.end_step(keep_states=False)
    if outputs is not None and engines.holds_loss and engines.topology.tp.rank == 0:
        outputs += [(batches[number].draw_ids_b, output_bc) for number, output_bc in programs[-1].outputs.items()]
    return report_losses(engines, programs[-1])
