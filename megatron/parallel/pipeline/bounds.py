"""Lower bounds on the time of a pipeline's step, over all orders of its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.parallel.pipeline.simulate import Hop, Pipeline


@dataclass(frozen=True)
class _Traffic:
    """Messages of a micro-batch to and from a rank, in seconds.

    Args:
        coding_s: encoding and decoding on this rank.
        sent_s, received_s: transfers out of this rank, which share its link, and those into it.
    """

    coding_s: float
    sent_s: float
    received_s: float


def list_bounds(pipeline: Pipeline, micro_batches: int, flush: bool = True) -> list[float]:
    """List lower bounds on the step time, in seconds.

    Each rank computes and codes for all micro-batches, after the first forward has passed the preceding ranks; the
    last backward, without weight gradients, passes these ranks again. Messages into a rank, and out of it, share its
    link. Without ``flush``, other steps run while a pipeline fills and drains.

    Each bound is a sum of multiples of the pipeline's times. So where compressors change different times, their changes
    of a bound add up.
    """
    bounds, layout = [], pipeline.layout
    fill_s = drain_s = 0.0  # until the rank's first input has arrived, and after its last output was encoded
    for rank, traffic in enumerate(_list_traffic(pipeline)):
        virtual_stages = layout.virtual_stages(rank)
        busy_s = sum(pipeline.forward_s[stage] + pipeline.backward_s[stage] for stage in virtual_stages)
        busy_s = micro_batches * (busy_s + traffic.coding_s)
        weight_s = micro_batches * sum(pipeline.weight_s[stage] for stage in virtual_stages)
        if not flush:
            bounds.append(busy_s)
            continue
        sent_s, received_s = micro_batches * traffic.sent_s, micro_batches * traffic.received_s
        bounds += [fill_s + busy_s, fill_s + busy_s - weight_s + drain_s, fill_s + sent_s, received_s]
        if rank < pipeline.stages - 1:
            forth, back = (_fastest_hop(pipeline, forward, rank) for forward in (True, False))
            before_s = _fastest_hop(pipeline, True, rank - 1).decode_s if rank > 0 else 0.0
            after_s = _fastest_hop(pipeline, False, rank - 1).encode_s if rank > 0 else 0.0
            fill_s += before_s + pipeline.forward_s[rank] + forth.encode_s + forth.transfer_s + forth.latency_s
            compute_s = pipeline.backward_s[rank] - pipeline.weight_s[rank]
            drain_s += back.transfer_s + back.latency_s + back.decode_s + compute_s + after_s
    return bounds


def _list_traffic(pipeline: Pipeline) -> Sequence[_Traffic]:
    """List the messages of a micro-batch, by rank."""
    layout = pipeline.layout
    coding_s, sent_s, received_s = ([0.0] * pipeline.stages for _ in range(3))
    for boundary in filter(layout.crosses, range(len(pipeline.forward_s) - 1)):
        for forward in (True, False):
            sender, receiver = layout.ends_of(boundary, forward)
            hop = _fastest_hop(pipeline, forward, boundary)
            coding_s[sender] += hop.encode_s
            coding_s[receiver] += hop.decode_s
            sent_s[sender] += hop.transfer_s
            received_s[receiver] += hop.transfer_s
    return [_Traffic(*seconds) for seconds in zip(coding_s, sent_s, received_s, strict=True)]


def _fastest_hop(pipeline: Pipeline, forward: bool, boundary: int) -> Hop:
    """The parts of a message, each as fast as in messages that are sent late or in others."""
    early, late = (pipeline.hops(forward, boundary, is_late) for is_late in (False, True))
    return Hop(
        min(early.encode_s, late.encode_s),
        min(early.transfer_s, late.transfer_s),
        min(early.latency_s, late.latency_s),
        min(early.decode_s, late.decode_s),
    )
