"""Computation of a step on this rank's chunks, and its launch signatures, losses and metrics."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from megatron.compression.api import SampleKey
from megatron.compression.points import Point
from megatron.data.batch import Batch
from megatron.distributed.ledger import Ledger
from megatron.models.context import ForwardContext
from megatron.models.losses import LossSum, Targets
from megatron.models.stage import Stage
from megatron.optimizer.optimizer import StepTotals
from megatron.parallel.pipeline.engine import Span
from megatron.parallel.pipeline.schedule import PipelineOp
from megatron.parallel.pipeline.timetable import Timetable
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

    On the chunk with the losses, ``sums`` adds up the ``losses`` of the micro-batches. In an evaluation, ``outputs``
    holds the task-head output of each micro-batch.
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
        """Key of a micro-batch's messages over a boundary."""
        batch = self.batches[micro_batch]
        key = SampleKey(batch.sample_ids_b.tolist())
        if self.keys_hold_tokens:
            topology, parallel = self.engines.topology, self.engines.config.parallel
            # After the encoder, messages hold the decoder's activations before the encoder's.
            decoder_tokens_bs = batch.decoder_tokens_bs if topology.layout.follows_encoder(boundary) else None
            sequences = [x.t() for x in (decoder_tokens_bs, batch.tokens_bs) if x is not None]
            # Sequence parallelism splits each sequence; other split messages hold slices of the concatenation.
            if not parallel.sequence_parallel:
                sequences = [torch.cat(sequences)]
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
        experts, expert_context = self.engines.experts, None
        if experts.has_experts and self.loss_grad is not None:
            expert_context = experts.context(micro_batch, self.loss_grad)
        context = ForwardContext(
            dropout=self._dropout_keys(batch),
            position_ids_bs=batch.position_ids_bs if self.engines.config.data.reset_position_ids else None,
            segment_ids_bs=batch.segment_ids_bs,
            types_bs=batch.types_bs,
            decoder_tokens_bs=batch.decoder_tokens_bs,
            decoder_segment_ids_bs=batch.decoder_segment_ids_bs,
            experts=expert_context,
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
        sums = []
        for terms in zip(*self.losses, strict=True):
            totals_m = torch.stack([term.total for term in terms]).double()
            counts_m = torch.stack([term.count for term in terms]).double()
            sums.append((float(totals_m.sum()), float(counts_m.sum())))
        return sums


def _make_targets(batch: Batch, keys: DropoutKeys | None = None) -> Targets:
    assert batch.labels_bs is not None
    assert batch.loss_mask_bs is not None
    return Targets(batch.labels_bs, batch.loss_mask_bs, batch.order_b, batch.lengths_b, keys)


def batch_shapes(batches: Sequence[Batch]) -> Hashable:
    """Shapes of all tensors of the micro-batches; None for tensors that this rank does not need."""
    return frozenset(
        tuple((name, None if x is None else tuple(x.shape)) for name, x in vars(batch).items()) for batch in batches
    )


def begin_passes(
    engines: Engines, batches: Sequence[Batch], iteration: int, length: int
) -> tuple[Timetable, list[ChunkProgram], Tensor]:
    """Begin a training step at all communication points except that of delayed gradients, and make its passes.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        iteration: 0-based number of the step.
        length: tokens of each sample.

    Returns:
        The operations of all pipeline stages, the programs of this rank's chunks, and the gradient of each
        micro-batch's objective.
    """
    config, count = engines.config, len(batches)
    engines.begin_step(iteration, length)
    if engines.delayed is None:
        engines.sync.begin_step(iteration, engines.optimizer.loss_scale.scale)
    engines.experts.begin_step()
    dp, islands, divisors = engines.topology.dp, engines.sync_warmup.islands_in_step, None
    # All ranks count the unmasked labels if the group of the replicas may be reducing gradients.
    counts_in_world = engines.delayed is not None and engines.delayed.versions is None
    if config.masks_labels and (engines.holds_loss or counts_in_world):
        # Divisors turn each loss's sum over micro-batches into the mean over the global batch's unmasked labels. If no
        # label is masked, micro-batches of equal size are averaged.
        counts = torch.zeros(len(config.model.loss_names), dtype=torch.float64, device=engines.topology.device)
        if engines.holds_loss and (not counts_in_world or engines.topology.tp.rank == 0):
            last_stage = engines.stages[-1]
            counts = torch.stack([last_stage.counts(_make_targets(batch)) for batch in batches]).double().sum(dim=0)
        group = engines.topology.world if counts_in_world else dp
        engines.ledger.complete(Point.CONTROL, group.all_reduce(counts))
        engines.sync_warmup.all_reduce([counts])
        # A loss without unmasked labels is zero with any divisor.
        divisors = counts.clamp_(min=1.0) / (count * dp.size * islands)
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
    table = engines.pipeline.get_timetable(config.parallel.pipeline_schedule, count)
    return table, programs, loss_grad


def launch_signatures(engines: Engines, batches: Sequence[Batch], length: int) -> list[Hashable]:
    """Launch signatures of a training step that has begun, without those of its messages."""
    signatures = [
        ("training", len(batches), length, batch_shapes(batches)),
        *engines.comm.launch_signature(length),
        *engines.sync.launch_signature(),
        *expert_signatures(engines),
    ]
    if any(observer.launches_kernels for observer in engines.ledger.observers):
        signatures.append(None)
    return signatures


def report_losses(engines: Engines, last_chunk: ChunkProgram) -> dict[str, tuple[float, float]]:
    """Sum and count of each loss, by name; zero on ranks that do not report."""
    names = engines.config.model.loss_names
    reports = engines.holds_loss and engines.topology.tp.rank == 0
    return dict(zip(names, last_chunk.sums() if reports else [(0.0, 0.0)] * len(names), strict=True))


def make_metrics(
    engines: Engines, totals: StepTotals, iteration: int, num_micro_batches: int, length: int
) -> StepMetrics:
    """Make the metrics of a step from its totals, without its losses.

    Args:
        engines: engines of this rank.
        totals: totals of the step; a step whose gradients are not finite counts as skipped.
        iteration: 0-based number of the step.
        num_micro_batches: number of its micro-batches on each replica.
        length: tokens of each sample.
    """
    replicas = engines.topology.layout.dp * engines.sync_warmup.num_islands
    return StepMetrics(
        iteration=iteration + 1,
        losses={},
        global_batch_size=num_micro_batches * engines.config.training.micro_batch_size * replicas,
        seq_length=length,
        loss_scale=totals.loss_scale,
        grad_norm=totals.grad_norm,
        params_norm=totals.params_norm,
        num_zeros=totals.num_zeros,
        votes=totals.votes,
        skipped_iterations=int(not totals.finite),
        finite_gradients=totals.finite,
        searches_loss_scale=not totals.finite and totals.scale_can_fall,
    )


def expert_signatures(engines: Engines) -> list[Hashable]:
    """Launch signatures of expert layers: None (unpredictable), because their shapes change in every step."""
    return [None] if engines.experts.has_experts else []


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
