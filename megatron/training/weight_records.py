"""Memory that weight gradients wait in, estimated before the first step."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron.config.memory import format_bytes
from megatron.config.training import batch_schedule
from megatron.distributed.ledger import gather_rows
from megatron.models.attention import CrossAttention
from megatron.models.block import DecoderLayer
from megatron.models.experts import Experts
from megatron.models.stage import Stage
from megatron.parallel.pipeline.schedule import WITH_WEIGHT_PASSES
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.planner.footprint import count_held, held_by_rank
from megatron.training.assembly import Engines


def weight_record_notes(engines: Engines) -> list[str]:
    """Say how many backward passes may wait for their weight gradients, and in how much memory. A collective call."""
    config = engines.config
    has_weight_passes = engines.channel is not None and config.parallel.pipeline_schedule in WITH_WEIGHT_PASSES
    if config.validation.skip_train or not has_weight_passes:
        return []
    rows = gather_rows(engines.topology.control, engines.ledger, list(estimate_records(engines)))
    most_passes, most_bytes = map(max, zip(*rows, strict=True))
    passes_wait = "pass of a stage waits" if most_passes == 1 else "passes of a stage wait"
    return [
        f"weight gradients: up to {most_passes:.0f} backward {passes_wait} for theirs, in about "
        f"{format_bytes(most_bytes)} of records; --pipeline-max-weight-records limits them"
    ]


def estimate_records(engines: Engines) -> tuple[float, float]:
    """Estimate the largest number of backward passes on this rank that wait for their weight gradients at the same
    time, and the largest number of bytes in their records.

    Before the choice of ``--pipeline-schedule auto``, as many as its limits allow. The steps are those of the largest
    batch. The bytes are those of full sequences, and of experts with equal loads.
    """
    training, layout, stage = engines.config.training, engines.topology.layout, engines.topology.coordinates.pp
    largest_batch = max(batch_schedule(training, engines.config.model.seq_length).sizes)
    micro_batches = largest_batch // (training.micro_batch_size * engines.topology.dp.size)
    chosen = engines.pipeline.measured
    if chosen is not None and chosen.is_final:
        held_counts = count_held(chosen.schedules(micro_batches)[stage], layout.chunks)
    else:
        schedule = engines.config.parallel.pipeline_schedule
        held_counts = held_by_rank(schedule, layout.pp, stage, layout.chunks, micro_batches, engines.pipeline.limits)
    chunk_bytes = [sum(_list_record_bytes(stage, engines)) for stage in engines.stages]
    records_by_chunk = [[records for _, records in counts] for counts in held_counts]
    most_bytes = max(
        sum(count * nbytes for count, nbytes in zip(records, chunk_bytes, strict=True)) for records in records_by_chunk
    )
    return float(max(map(sum, records_by_chunk))), float(most_bytes)


def _list_record_bytes(stage: Stage, engines: Engines) -> Iterator[float]:
    """List the bytes of each record of a micro-batch's backward pass: factors of a weight's gradient."""
    model, sequences = engines.config.model, engines.config.training.micro_batch_size
    tokens = sequences * model.seq_length
    rows_of: dict[nn.Module, float] = {}  # of layers that do not take all tokens of the encoder, or of the only part
    for module in stage.modules():
        if isinstance(module, DecoderLayer):
            rows_of |= dict.fromkeys(module.modules(), sequences * (model.decoder_seq_length or 0))
        elif isinstance(module, CrossAttention):
            rows_of[module.key_value] = tokens
        elif isinstance(module, Experts):
            sharing_ranks = module.comm.size if module.expert_comm.folded else 1
            kept_share = min(1.0, model.moe_expert_capacity_factor or 1.0)
            expert_rows = kept_share * tokens * model.moe_router_topk / (module.local * sharing_ranks)
            rows_of |= dict.fromkeys(module.experts.modules(), expert_rows)
    for module in stage.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            yield module.record_bytes(rows_of.get(module, tokens))
    if stage.stage_part.last and model.predicts_words and stage.comm.size > 1:
        num_labels = sequences * model.labels_of(model.seq_length)
        yield float(num_labels * sum(stage.output_weight.shape) * stage.output_weight.itemsize)
