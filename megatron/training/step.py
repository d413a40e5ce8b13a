"""One training step and one evaluation step, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice

import torch
from torch import Tensor, nn

from megatron.compression.api import SampleKey
from megatron.compression.points import Point
from megatron.data.batch import Batch
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
    """The computation of one model chunk on the micro-batches of one step.

    Args:
        stage: the chunk.
        batches: the step's micro-batches on this rank.
        seed: seed of the dropout masks; None turns dropout off.
        engines: engines of this rank.
        divisors: see ``Stage.loss``.
        loss_grad: gradient of each micro-batch's objective; None in evaluation.

    The chunk that holds the losses adds them up over the micro-batches in ``sums``. In an evaluation, ``outputs`` keeps
    the task-head output of each micro-batch.
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
            # Sequence parallelism splits each sequence, and split messages carry slices of the joined sequences.
            wholes = sent if parallel.sequence_parallel else [torch.cat(sent)]
            part_count = parallel.message_parts
            key.tokens_sb = torch.cat([x.chunk(part_count)[topology.tp.rank % part_count] for x in wholes])
            key.vocab_size = self.engines.vocab_size
        return key

    def _keys(self, batch: Batch) -> DropoutKeys | None:
        return None if self.seed is None else DropoutKeys(self.seed, tuple(batch.draw_ids_b.tolist()))

    def _context(self, batch: Batch, micro_batch: int) -> ForwardContext:
        data, experts = self.engines.config.data, None
        if self.engines.experts.on and self.loss_grad is not None:
            experts = self.engines.experts.context(micro_batch, self.loss_grad)
        return ForwardContext(
            dropout=self._keys(batch),
            position_ids_bs=batch.position_ids_bs if data.reset_position_ids else None,
            segment_ids_bs=batch.segment_ids_bs,
            types_bs=batch.types_bs,
            decoder_tokens_bs=batch.decoder_tokens_bs,
            decoder_segment_ids_bs=batch.decoder_segment_ids_bs,
            experts=experts,
        )

    def forward(self, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        batch = self.batches[micro_batch]
        x = batch.tokens_bs if self.stage.stage_part.first else x_sbh
        assert x is not None
        replicas = self.engines.replicas
        run: nn.Module = self.stage
        if replicas is not None and torch.is_grad_enabled():
            replicas.all_reduce_in_backward(micro_batch == len(self.batches) - 1)
            run = replicas.wrapped
        out_sbh: Tensor = run(x, self._context(batch, micro_batch))
        if not self.stage.stage_part.last:
            return out_sbh
        result = self.stage.loss(out_sbh, _targets(batch, self._keys(batch)), self.divisors)
        self.losses.append(result.sums)
        if result.outputs_bc is not None and not torch.is_grad_enabled():
            self.outputs[micro_batch] = result.outputs_bc
        return result.objective

    def sums(self) -> list[tuple[float, float]]:
        """Sum in nats and count of each of the model's losses."""
        losses = zip(*self.losses, strict=True)
        return [(_total([term.total for term in terms]), _total([term.count for term in terms])) for terms in losses]


def _total(scalars: Sequence[Tensor]) -> float:
    return float(torch.stack(list(scalars)).double().sum())


def _targets(batch: Batch, keys: DropoutKeys | None = None) -> Targets:
    assert batch.labels_bs is not None
    assert batch.loss_mask_bs is not None
    return Targets(batch.labels_bs, batch.loss_mask_bs, batch.order_b, batch.lengths_b, keys)


def take_batches(
    batches: Iterator[Batch], count: int, device: torch.device, seq_length: int | None = None
) -> list[Batch]:
    """Take the next ``count`` micro-batches and move them to the device.

    Args:
        batches: micro-batches of this rank.
        count: number of micro-batches.
        device: device for their tokens.
        seq_length: tokens of each sample; further tokens are cut off. None for all.

    Raises:
        RuntimeError: when there are no more samples.
    """
    step_batches = [
        (batch if seq_length is None else batch.truncated(seq_length)).to(device) for batch in islice(batches, count)
    ]
    if len(step_batches) != count:
        raise RuntimeError(f"the data set ended after {len(step_batches)} of {count} micro-batches of this step")
    return step_batches


def _shapes(batches: Sequence[Batch]) -> Hashable:
    """Shapes of all tensors of the micro-batches; None for tensors that a stage does not need."""
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
    """Run one training step: forward and backward of all micro-batches, gradient reduction, update.

    Returns the step's metrics, the same on every rank, without the run's position.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        iteration, lr, weight_decay, decoupled_lr: 0-based number of this step, and its rates (see ``Optimizer.step``).
        votes: this rank's request to stop.
        timers, seq_length: timers of the step's phases; tokens of each sample, None for the full length.
    """
    ledger, config = engines.ledger, engines.config
    length = seq_length or config.model.seq_length
    timers = timers or Timers(clock=ledger.clock)
    last_chunk = _forward_backward(engines, batches, iteration, length, timers)
    replicas = engines.topology.layout.dp * engines.sync_warmup.count
    losses, all_finite = _reduce(engines, last_chunk, iteration, timers)
    with ledger.computing(), timers("optimizer", level=1), ledger.span("optimizer"):
        totals = engines.optimizer.step(
            losses,
            iteration=iteration,
            lr=lr,
            weight_decay=weight_decay,
            decoupled_lr=decoupled_lr,
            votes=votes,
            publish_update=engines.sync.needs_update,
            freeze_variance=engines.sync.freezes_variance,
            clipped=engines.sync.clips_first,
            all_finite=all_finite,
        )
    if not totals.skipped and engines.sync.needs_update:
        engines.sync.observe_update()
    own_losses, loads = engines.experts.finish_step(len(batches), not totals.skipped)
    engines.plan.steps.skipped += totals.skipped
    engines.end_step(step_taken=not totals.skipped)
    return StepMetrics(
        iteration=iteration + 1,
        losses={**totals.losses, **own_losses},
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


def _reduce(
    engines: Engines, last_chunk: ChunkProgram, iteration: int, timers: Timers
) -> tuple[dict[str, tuple[float, float]], bool]:
    """Reduce the gradients, over islands too while they take steps together; return this rank's losses, and the result
    of ``GradientSync.finish_reduction``."""
    reduction = "grads-reduce-scatter" if engines.optimizer.sharded else "grads-all-reduce"
    with engines.ledger.computing(), timers(reduction, level=1):
        losses = _reported(engines, last_chunk)
        all_finite = engines.sync.finish_reduction(sum(count for _, count in losses.values()))
        sync_warmup = engines.sync_warmup
        if all_finite and sync_warmup.active and sync_warmup.compressed:
            assert engines.outer is not None
            assert sync_warmup.group is not None
            with sync_warmup.explain_errors():
                engines.outer.sum_gradients(sync_warmup.group, iteration, engines.optimizer.loss_scale.scale)
        return losses, all_finite


def _reported(engines: Engines, last_chunk: ChunkProgram) -> dict[str, tuple[float, float]]:
    """Sum and count of each loss, as ``evaluation_step`` returns them."""
    names = engines.config.model.loss_names
    reports = engines.holds_loss and engines.topology.tp.rank == 0
    return dict(zip(names, last_chunk.sums() if reports else [(0.0, 0.0)] * len(names), strict=True))


def _divisors(engines: Engines, batches: Sequence[Batch]) -> Tensor | None:
    """Divisors of the losses, which turn the sum over micro-batches into a mean over the global batch's counted labels.

    None if all labels count: micro-batches of equal size are averaged.
    """
    if not engines.config.masks_labels or not engines.holds_loss:
        return None
    dp = engines.topology.dp
    counts = torch.stack([engines.stages[-1].counts(_targets(batch)) for batch in batches]).double().sum(dim=0)
    pending = dp.all_reduce(counts)
    engines.ledger.count_message(Point.CONTROL, pending.sent_bytes)
    engines.ledger.wait_for(Point.CONTROL, pending)
    engines.sync_warmup.all_reduce([counts])
    # A loss without any counted label is zero, whatever the divisor.
    return counts.clamp_(min=1.0) / (len(batches) * dp.size * engines.sync_warmup.islands)


def _forward_backward(
    engines: Engines, batches: Sequence[Batch], iteration: int, length: int, timers: Timers
) -> ChunkProgram:
    """Run forward and backward of all micro-batches; return the program of the last chunk, which holds the losses."""
    config, count = engines.config, len(batches)
    with engines.ledger.computing():
        for buffer in engines.buffers:
            buffer.begin_grads()
    engines.begin_step(iteration, length)
    engines.experts.begin_step()
    divisors = _divisors(engines, batches)
    table = engines.pipeline.get_timetable(config.parallel.pipeline_schedule, count)
    signatures = [
        ("training", count, length, _shapes(batches)),
        *engines.comm.launch_signature(length),
        *engines.sync.launch_signature(),
    ]
    signatures += _expert_signatures(engines)
    # A micro-batch's objective is its share of the batch mean, times the number of micro-batches. Auxiliary losses of
    # expert layers, means over all tokens of a micro-batch, have the same gradient.
    loss_grad = torch.tensor(
        engines.optimizer.loss_scale.scale / (count * engines.topology.layout.dp * engines.sync_warmup.islands),
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


def _expert_signatures(engines: Engines) -> list[Hashable]:
    """Launch signatures of expert layers: None, since their shapes change in every step."""
    return [None] if engines.experts.on else []


_SPAN_NAMES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-send": "send",
    "backward-send": "send",
}
_COMPUTING = ("forward-compute", "backward-compute")


def pipeline_span(timers: Timers, ledger: Ledger) -> Span:
    """Return a context for each pipeline operation: its timer, the ledger's computing time, and observers' spans."""

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
    """Run some micro-batches forward without dropout.

    Args:
        engines: engines of this rank.
        batches: micro-batches of this rank.
        outputs: receives, on the rank that reports, the task-head output of each micro-batch, and its draws.

    Returns:
        Sum of each loss in nats and its count, by name, over this rank's samples; zero on ranks that do not report
        (other stages and tensor-parallel ranks).
    """
    length = engines.config.model.seq_length
    engines.begin_step(-1, length)
    programs = [ChunkProgram(stage, batches, None, engines) for stage in engines.stages]
    table = engines.pipeline.get_timetable(None, len(batches))
    signatures = [("evaluation", len(batches), length, _shapes(batches)), *engines.comm.launch_signature(length)]
    signatures += _expert_signatures(engines)
    engines.pipeline.run(table, programs, -1, len(batches), None, signatures)
    engines.end_step(step_taken=False)
    if outputs is not None and engines.holds_loss and engines.topology.tp.rank == 0:
        outputs += [(batches[number].draw_ids_b, found_bc) for number, found_bc in programs[-1].outputs.items()]
    return _reported(engines, programs[-1])
