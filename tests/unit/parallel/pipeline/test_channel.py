"""Messages in V form: their codecs, and their receives from both neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron.compression.builtin import BUILTIN
from megatron.compression.identity import IdentityCodec
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.distributed.group import Group, Pending
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan, Position
from megatron.parallel.pipeline.channel import Message, PipelineChannel

LAYOUT = Layout(pp=3, chunks=2, v_shaped=True)
SHAPE = torch.Size((8, 2, 16))


class _Receive:
    """A receive that has completed on the device, as far as the host does not know."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.waited = False
        self.is_synchronized = False

    def wait(self) -> None:
        self.waited = True

    def synchronize(self) -> None:
        self.is_synchronized = True


class _Link(Group):
    """A pipeline's ranks whose receives are recorded."""

    def __init__(self) -> None:
        super().__init__(None, (0, 1, 2), 1, "link", "none")
        self.receives: list[_Receive] = []

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Pending:
        self.receives.append(_Receive(src))
        return cast(Any, self.receives[-1])


def _channel(specs: Sequence[str] = ()) -> tuple[PipelineChannel, _Link]:
    """Channel of the middle rank."""
    plan = CompressionPlan(read_specs(list(specs), Registry(BUILTIN), RunLength()), 1, LAYOUT.pp)
    forward, dtype = _Link(), torch.float32
    shapes = [SHAPE] * (LAYOUT.num_virtual_stages - 1)
    return PipelineChannel(LAYOUT, forward, _Link(), plan, Ledger(), shapes, dtype, torch.device("cpu")), forward


def test_the_host_synchronizes_with_the_receives_from_both_neighbors() -> None:
    """A later receive from one of them says nothing about those from the other."""
    channel, link = _channel()
    for boundary in (0, 3):
        for micro_batch in range(2):
            channel.post([Message(channel.forward, Position(0, boundary, micro_batch, 2), None)])
    assert [receive.source for receive in link.receives] == [0, 0, 2, 2]
    channel.synchronize()
    assert [receive.is_synchronized for receive in link.receives] == [False, True, False, True]


@pytest.mark.parametrize("covered", [0, 1, 2])
def test_stages_of_a_spec_are_the_ranks_of_the_senders(covered: int) -> None:
    specs = [f"{point}=fixpoint,bits=4,stages=first:{covered}" for point in ("pp-forward", "pp-backward") if covered]
    channel, _ = _channel(specs)
    senders = {Point.PP_FWD: {0: 0, 1: 1, 3: 2, 4: 1}, Point.PP_BWD: {0: 1, 1: 2, 3: 1, 4: 0}}
    for way in (channel.forward, channel.backward):
        for boundary, sender in senders[way.point].items():
            codec = channel._codec(way, Position(0, boundary, 0, 2))
            assert isinstance(codec, IdentityCodec) == (sender >= covered)
