"""Observers' view of a pipeline's messages and of the steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.distributed.observer import Observer, SentMessage
from megatron.distributed.policy import Position
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

Observed = dict[tuple[str, int, int], Tensor]
"""By point, iteration and micro-batch."""


class Witness(Observer):
    """Keeps all that it is shown."""

    def __init__(self) -> None:
        self.sent: Observed = {}
        self.errors: Observed = {}
        self.received: Observed = {}
        self.steps: list[int | str] = []

    def begin_step(self, iteration: int) -> None:
        self.steps.append(iteration)

    def end_step(self) -> None:
        self.steps.append("end")

    def on_send(self, sent: SentMessage) -> None:
        key = (sent.point.value, sent.position.iteration, sent.position.micro_batch)
        self.sent[key], self.errors[key] = sent.x.clone(), sent.error().clone()

    def on_receive(self, point: Point, position: Position, x: Tensor) -> None:
        self.received[point.value, position.iteration, position.micro_batch] = x.detach().clone()


def _rank() -> Witness:
    engines = tiny_engines(
        {
            "parallel": {"pipeline_model_parallel_size": 2},
            "compression": {"compress": ["pp-backward=fixpoint,bits=4,error-feedback=off"]},
        }
    )
    witness = Witness()
    engines.ledger.observers.append(witness)
    tiny_train(engines, 2)
    return witness


def test_an_observer_sees_each_message_at_both_ends() -> None:
    first, last = run_ranks(2, _rank)
    ways = {"pp-forward": (first, last), "pp-backward": (last, first)}
    for point, (sender, receiver) in ways.items():
        assert list(sender.sent) == list(receiver.received) == [(point, step, at) for step in (0, 1) for at in range(4)]
        for key, x in sender.sent.items():
            torch.testing.assert_close(x - sender.errors[key], receiver.received[key])
            assert bool(sender.errors[key].any()) == (point == "pp-backward")
    assert first.steps == last.steps == [0, "end", 1, "end"]
