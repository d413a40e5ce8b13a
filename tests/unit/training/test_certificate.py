"""``--certificate``: which messages of a step are sampled."""

from __future__ import annotations

from megatron.compression.audit import AuditedCodec
from megatron.compression.cast import CastCodec, CastConfig
from megatron.compression.points import Point
from megatron.distributed.observer import Observer
from megatron.training.certificate import MessageSampler


def _sampled_messages(sampler: MessageSampler, counts: dict[Point, int]) -> dict[Point, list[int]]:
    """Numbers of the messages that are sampled in a step with so many of each point, which take turns."""
    sampler.join()
    sampled: dict[Point, list[int]] = {point: [] for point in counts}
    for number in range(max(counts.values())):
        for point in (point for point, count in counts.items() if number < count):
            if isinstance(sampler.audit(point, CastCodec(CastConfig())), AuditedCodec):
                sampled[point].append(number)
    sampler.leave()
    return sampled


def test_each_sampled_step_takes_another_message_of_each_point() -> None:
    """The first step takes the first ones, since the number of messages is not known yet."""
    observers: list[Observer] = []
    sampler = MessageSampler(observers)
    counts = {Point.PP_FWD: 3, Point.PP_BWD: 2, Point.DP_GRAD: 1}
    steps = [_sampled_messages(sampler, counts) for _ in range(7)]
    assert [step[Point.PP_FWD] for step in steps] == [[0], [2], [0], [1], [2], [0], [1]]
    assert [step[Point.PP_BWD] for step in steps] == [[0], [0], [1], [0], [1], [0], [1]]
    assert [step[Point.DP_GRAD] for step in steps] == [[0]] * 7
