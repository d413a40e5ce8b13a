"""Messages in V form: their codecs, and their receives from both neighbors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megatron.compression.api import Payload
from megatron.compression.builtin import BUILTIN
from megatron.compression.identity import IdentityCodec
from megatron.compression.options import CompressorFault
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.compression.state import CompressorState
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
            channel.post([Message(channel.forward, Position(0, boundary, micro_batch), None)])
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
            codec = channel._codec(way, Position(0, boundary, 0))
            assert isinstance(codec, IdentityCodec) == (sender >= covered)


class _ShortCodec(IdentityCodec):
    """A codec whose messages do not fill the receiver's buffer."""

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(shape.numel() + 4, dtype=torch.uint8, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        return Payload(x.flatten().to(torch.uint8))


def test_a_message_that_does_not_fill_the_buffer_of_its_receiver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would decode what happened to be in the rest of its buffer."""
    channel, _ = _channel()
    monkeypatch.setattr(channel, "_codec", lambda way, position: _ShortCodec())
    message = Message(channel.forward, Position(0, 1, 0), None)
    expected = r"pp-forward: encode makes a message of \(256,\) torch\.uint8, but empty_payload has room for"
    with pytest.raises(CompressorFault, match=expected + r" \(260,\) torch\.uint8"):
        channel.send(message, torch.zeros(SHAPE))


class _LongCodec(_ShortCodec):
    """A codec whose messages are more than twice as long as uncompressed ones."""

    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        return Payload(torch.empty(8 * shape.numel() + 1, dtype=torch.uint8, device=device))

    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        return self.empty_payload(x.shape, x.dtype, x.device, state, key)


def test_a_message_that_does_not_fit_into_a_mailbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receiver would end with an error of gloo."""
    channel, link = _channel()
    channel.shapes = [torch.Size((64, 2, 16))] * (LAYOUT.num_virtual_stages - 1)
    monkeypatch.setattr(channel, "_codec", lambda way, position: _LongCodec())
    monkeypatch.setattr(link, "send", Mock())
    message, x = Message(channel.forward, Position(0, 1, 0), None), torch.zeros(64, 2, 16)
    channel.send(message, x)
    channel.mailbox_buffers = 1
    with pytest.raises(CompressorFault, match=r"pp-forward: a message has 16,385 bytes, more than 2 times as many as"):
        channel.send(message, x)


def test_messages_of_a_codec_with_restored_samples_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their size depends on the samples, which a fresh state does not have."""
    channel, link = _channel()
    monkeypatch.setattr(channel, "_codec", lambda way, position: _ShortCodec())
    send = Mock()
    monkeypatch.setattr(link, "send", send)
    channel.forward.sent[1] = CompressorState()
    channel.forward.sent[1].cache("samples", 4).visit(0, SHAPE[-1])
    channel.send(Message(channel.forward, Position(0, 1, 0), None), torch.zeros(SHAPE))
    send.assert_called_once()
