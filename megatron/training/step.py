"""The training step and the evaluation step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice

import torch
from torch import Tensor, nn

from megatron.compression.api import SampleKey
from megatron.compression.points import Point
from megatron.data.batch import Batch
from megatron.data.loader import MicroBatches, build_loader
from megatron.data.source import SampleSource
from megatron.distributed.ledger import Ledger
from megatron.models.context import ForwardContext
from megatron.models.losses import LossSum, Targets
from megatron.models.stage import Stage
from megatron.optimizer.step_summary import NO_VOTES, StopVotes
from megatron.parallel.pipeline.engine import Span
from megatron.parallel.pipeline.schedule import PipelineOp
from megatron.parallel.tensor.random import DropoutKeys
from megatron.training.assembly import Engines
from megatron.training.metrics import StepMetrics
from megatron.training.timers import Timers


class ChunkProgram:
    """Computation of a model chunk on the micro-batches of a step.

    Args:
        stage: model chunk.
        batches: micro-batches of the step on this rank.
        seed: seed of the dropout masks; None without dropout.
        engines: engines of this rank.
        divisors: see ``Stage.loss``.
        loss_grad: gradient of each micro-batch's objective; None in evaluation.

    On the chunk with the losses, ``sums`` adds them up over the micro-batches. In an evaluation, ``outputs`` holds the
    task-head output of each micro-batch.
    """

    def __init__(
        self,
        stage: Stage,
        batches: Sequence[Batch],
        seed: int | None,
        engines: Engines,
        divisors: Tensor | None = None,
        loss_grad: Tensor | None = None,
    ) -> None:
        self.stage = stage
        self.batches = batches
        self.seed = seed
        self.engines = engines
        self.keys_hold_tokens = engines.keys_hold_tokens
        self.divisors = divisors
        self.loss_grad = loss_grad
        self.losses: list[tuple[LossSum, ...]] = []
        self.outputs: dict[int, Tensor] = {}

    def key(self, micro_batch: int, boundary: int) -> Hashable:
        batch = self.batches[micro_batch]
        key = SampleKey(batch.sample_ids_b.tolist())
        if self.keys_hold_tokens:
            topology, parallel = self.engines.topology, self.engines.config.parallel
            after_encoder = topology.layout.follows_encoder(boundary)
            sent = [
                x.t() for x in ([batch.decoder_tokens_bs] if after_encoder else []) + [batch.tokens_bs] if x is not None
            ]
            # Sequence parallelism splits each sequence; split messages hold slices of the concatenated sequences.
            sequences = sent if parallel.sequence_parallel else [torch.cat(sent)]
            part_count = parallel.message_parts
            key.tokens_sb = torch.cat([x.chunk(part_count)[topology.tp.rank % part_count] for x in sequences])
            key.vocab_size = self.engines.vocab_size
        return key

    def _dropout_keys(self, batch: Batch) -> DropoutKeys | None:
        return None if self.seed is None else DropoutKeys(self.seed, tuple(batch.draw_ids_b.tolist()))

    def forward(self, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        batch = self.batches[micro_batch]
        x = batch.tokens_bs if self.stage.stage_part.first else x_sbh
        assert x is not None
        replicas = self.engines.replicas
        run: nn.Module = self.stage
        if replicas is not None and torch.is_grad_enabled():
            replicas.wrapped.require_backward_grad_sync = micro_batch == len(self.batches) - 1
            run = replicas.wrapped
        experts = self.engines.experts
        context = ForwardContext(
            dropout=self._dropout_keys(batch),
            position_ids_bs=batch.position_ids_bs if self.engines.config.data.reset_position_ids else None,
            segment_ids_bs=batch.segment_ids_bs,
            types_bs=batch.types_bs,
            decoder_tokens_bs=batch.decoder_tokens_bs,
            decoder_segment_ids_bs=batch.decoder_segment_ids_bs,
            experts=experts.context(micro_batch, self.loss_grad) if experts.on and self.loss_grad is not None else None,
        )
        out_sbh: Tensor = run(x, context)
        if not self.stage.stage_part.last:
            return out_sbh
        result = self.stage.loss(out_sbh, _make_targets(batch, self._dropout_keys(batch)), self.divisors)
        self.losses.append(result.sums)
        if result.outputs_bc is not None and not torch.is_grad_enabled():
            self.outputs[micro_batch] = result.outputs_bc
        return result.objective

    def sums(self) -> list[tuple[float, float]]:
        """Sum in nats and count of each loss of the model."""
        losses = zip(*self.losses, strict=True)
        return [
            (_sum_scalars([term.total for term in terms]), _sum_scalars([term.count for term in terms]))
            for terms in losses
        ]


def _sum_scalars(scalars: Sequence[Tensor]) -> float:
    return float(torch.stack(list(scalars)).double().sum())


def _make_targets(batch: Batch, keys: DropoutKeys | None = None) -> Targets:
    assert batch.labels_bs is not None
    assert batch.loss_mask_bs is not None
    return Targets(batch.labels_bs, batch.loss_mask_bs, batch.order_b, batch.lengths_b, keys)


def open_loader(
    engines: Engines, dataset: SampleSource, consumed_samples: int, *, num_workers: int = 0, trains: bool = False
) -> MicroBatches:
    """Open this rank's micro-batches of a data set; close them after use.

    Args:
        engines: engines of this rank.
        dataset: the data set.
        consumed_samples: draws consumed by all ranks.
        num_workers: threads that prefetch.
        trains: whether islands divide the samples, as in training; in evaluations each island reads all of them.
    """
    dp, islands = engines.topology.dp, engines.config.islands
    return build_loader(
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


def take_full_batch(engines: Engines, batches: MicroBatches) -> list[Batch]:
    """Take this rank's micro-batches of a full global batch, or all that are left, the same number on all ranks."""
    training = engines.config.training
    count = training.global_batch_size // (training.micro_batch_size * engines.topology.dp.size)
    return take_batches(batches, min(count, len(batches)), engines.topology.device)


def _batch_shapes(batches: Sequence[Batch]) -> Hashable:
    """Shapes of all tensors of the micro-batches; None for tensors that this rank does not need."""
    return frozenset(
        tuple((name, None if x is None else tuple(x.shape)) for name, x in vars(batch).items()) for batch in batches
    )


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
    last_chunk = _forward_backward(engines, batches, iteration, length, timers)
    replicas = engines.topology.layout.dp * engines.sync_warmup.count
    reduction = "grads-reduce-scatter" if engines.optimizer.sharded else "grads-all-reduce"
    delayed, loss_scale = engines.delayed, engines.optimizer.loss_scale.scale
    with ledger.computing(), timers(reduction, level=1):
        losses = _report_losses(engines, last_chunk)
        new_finite = delayed.check_new() if delayed is not None else None
        if delayed is not None:
            gradients = delayed.take()
        else:
            gradients = engines.sync.reduce_gradients(sum(count for _, count in losses.values()))
        sync_warmup = engines.sync_warmup
        if gradients is not None and gradients.finite and sync_warmup.active and sync_warmup.compressed:
            assert engines.outer is not None
            assert sync_warmup.group is not None
            with sync_warmup.explain_errors():
                engines.outer.sum_gradients(sync_warmup.group, iteration, loss_scale)
    with ledger.computing(), timers("optimizer", level=1), ledger.span("optimizer"):
        totals = engines.optimizer.step(
            losses, gradients, lr, weight_decay, votes, decoupled_lr=decoupled_lr, new_finite=new_finite
        )
    updated = totals.grad_norm is not None
    if gradients is not None and gradients.needs_update and updated:
        engines.sync.observe_update()
    if delayed is None:
        engines.sync.end_step(keep_states=updated)
    else:
        with ledger.computing(), timers(reduction, level=1):
            delayed.end_step(updated)
            delayed.launch(iteration, loss_scale, usable=totals.usable)
    expert_losses, loads = engines.experts.finish_step(len(batches), totals.usable)
    engines.plan.steps.skipped += totals.skipped
    engines.end_step(keep_states=totals.usable)
    return StepMetrics(
        iteration=iteration + 1,
        losses={**totals.losses, **expert_losses},
        expert_loads=loads,
        global_batch_size=len(batches) * config.training.micro_batch_size * replicas,
        seq_length=length,
        loss_scale=totals.loss_scale,
        grad_norm=totals.grad_norm,
        params_norm=totals.params_norm,
        num_zeros=totals.num_zeros,
        votes=totals.votes,
        skipped_iterations=int(totals.skipped),
        finite_gradients=totals.finite,
        searches_loss_scale=not totals.finite and totals.scale_can_fall,
    )


def _report_losses(engines: Engines, last_chunk: ChunkProgram) -> dict[str, tuple[float, float]]:
    """Sum and count of each loss, by name; zero on ranks that do not report."""
    names = engines.config.model.loss_names
    reports = engines.holds_loss and engines.topology.tp.rank == 0
    return dict(zip(names, last_chunk.sums() if reports else [(0.0, 0.0)] * len(names), strict=True))


def _forward_backward(
    engines: Engines, batches: Sequence[Batch], iteration: int, length: int, timers: Timers
) -> ChunkProgram:
    """Run forward and backward of all micro-batches; return the program of the last chunk, with the losses."""
    config, count = engines.config, len(batches)
    with engines.ledger.computing():
        for buffer in engines.buffers:
            buffer.begin_grads()
    engines.begin_step(iteration, length)
    if engines.delayed is None:
        engines.sync.begin_step(iteration, engines.optimizer.loss_scale.scale)
    engines.experts.begin_step()
    dp, islands, divisors = engines.topology.dp, engines.sync_warmup.islands, None
    if config.masks_labels and (engines.holds_loss or engines.delayed is not None):
        # Divisors turn each loss's sum over micro-batches into the mean over the global batch's unmasked labels. If no
        # label is masked, micro-batches of equal size are averaged.
        counts = _count_labels(engines, batches)
        engines.sync_warmup.all_reduce([counts])
        # A loss without unmasked labels is zero with any divisor.
        divisors = counts.clamp_(min=1.0) / (count * dp.size * islands)
    table = engines.pipeline.get_timetable(config.parallel.pipeline_schedule, count)
    signatures = [
        ("training", count, length, _batch_shapes(batches)),
        *engines.comm.launch_signature(length),
        *engines.sync.launch_signature(),
    ]
    signatures += _expert_signatures(engines)
    if any(observer.launches_kernels for observer in engines.ledger.observers):
        signatures.append(None)
    # The objective of a micro-batch is its share of the batch mean, times the number of micro-batches. Auxiliary losses
    # of expert layers are means over the tokens of a micro-batch, and have the same gradient.
    loss_grad = torch.tensor(
        engines.optimizer.loss_scale.scale / (count * engines.topology.layout.dp * islands),
        dtype=torch.float64 if config.precision.fp64 else torch.float32,
        device=engines.topology.device,
    )
    programs = [
        ChunkProgram(stage, batches, config.training.seed, engines, divisors, loss_grad) for stage in engines.stages
    ]
    with timers("forward-backward", level=1):
        span = pipeline_span(timers, engines.ledger)
        engines.pipeline.run(table, programs, iteration, count, loss_grad, signatures, span=span)
    return programs[-1]


def _count_labels(engines: Engines, batches: Sequence[Batch]) -> Tensor:
    """Count the unmasked labels of the global batch, for each loss, in fp64.

    A collective call of the replicas with the losses. If gradients are delayed, one of all ranks: replicas would wait
    for the gradients that are on their way in their group.
    """
    dp, tp, world, delayed = engines.topology.dp, engines.topology.tp, engines.topology.world, engines.delayed
    counts = torch.zeros(len(engines.config.model.loss_names), dtype=torch.float64, device=engines.topology.device)
    if engines.holds_loss and (delayed is None or tp.rank == 0):
        counts = torch.stack([engines.stages[-1].counts(_make_targets(batch)) for batch in batches]).double().sum(dim=0)
    engines.ledger.complete(Point.CONTROL, (dp if delayed is None else world).all_reduce(counts))
    return counts


def _expert_signatures(engines: Engines) -> list[Hashable]:
    """Launch signatures of expert layers: None (unpredictable), because their shapes change in every step."""
    return [None] if engines.experts.on else []


_SPAN_NAMES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "weight-compute": "weight",
    "forward-send": "send",
    "backward-send": "send",
}
_COMPUTING = ("forward-compute", "backward-compute", "weight-compute")


def pipeline_span(timers: Timers, ledger: Ledger) -> Span:
    """Make the span of pipeline operations: timers, the ledger's computing time, and the observers' spans."""

    @contextmanager
    def span(name: str, op: PipelineOp) -> Iterator[None]:
        computing = ledger.computing() if name in _COMPUTING else nullcontext()
        op_labels = {"micro_batch": op.micro_batch, "chunk": op.chunk}
        observer_span = ledger.span(_SPAN_NAMES[name], **op_labels) if name in _SPAN_NAMES else nullcontext()
        with computing, timers(name, level=2), observer_span:
            yield

    return span


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
    signatures = [("evaluation", len(batches), length, _batch_shapes(batches)), *engines.comm.launch_signature(length)]
    signatures += _expert_signatures(engines)
    engines.pipeline.run(table, programs, -1, len(batches), None, signatures)
    engines.end_step(keep_states=False)
    if outputs is not None and engines.holds_loss and engines.topology.tp.rank == 0:
        outputs += [(batches[number].draw_ids_b, output_bc) for number, output_bc in programs[-1].outputs.items()]
    return _report_losses(engines, programs[-1])
