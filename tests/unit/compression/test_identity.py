"""The identity copies nothing and loses nothing."""

from __future__ import annotations

import torch

from megatron.compression.api import Op, Peers
from megatron.compression.identity import IdentityCodec, IdentityRounds
from megatron.compression.lockstep import run_lockstep
from megatron.compression.state import CompressorState


def test_the_codec_copies_nothing() -> None:
    codec, state = IdentityCodec(), CompressorState()
    x = torch.arange(6.0).view(2, 3)
    payload = codec.encode(x, state, None)
    assert payload.wire.data_ptr() == x.data_ptr()
    assert payload.nbytes == 24
    assert codec.decode(payload, x.shape, x.dtype, state, None) is payload.wire


def test_the_sum_is_one_reduction_that_a_reduce_scatter_may_serve() -> None:
    x = torch.ones(4)
    request = next(IdentityRounds().rounds(x, CompressorState(), Peers(0, 2)))
    assert (request.tensor, request.op, request.shard_only) == (x, Op.REDUCE, True)


def test_the_contribution_is_the_input_even_if_the_sum_overwrites_it() -> None:
    """Error feedback keeps input - local, zero here."""
    xs = [torch.full((3,), float(rank)) for rank in range(2)]
    inputs = [x.clone() for x in xs]
    for x, aggregate in zip(
        inputs, run_lockstep(IdentityRounds(), xs, [CompressorState(), CompressorState()]), strict=True
    ):
        local = aggregate.local
        assert torch.equal(local, x)
        assert torch.equal(aggregate.total, torch.ones(3))
