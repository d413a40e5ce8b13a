"""A plug-in codec with a memory for each sample (tests/support/sign_delta.py) against a reference loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.compression.contract import check_compressor, noise, save_and_load, send
from megatron.compression.plugins import build_registry
from megatron.compression.state import CompressorState
from tests.support import sign_delta
from tests.support.sign_delta import SignDelta, SignDeltaConfig
from tests.unit.compression.test_launches import _messages

S, H = 5, 7  # 35 numbers: the last byte is not full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [1.0, 0.75])
def test_messages_match_a_reference_loop(decay: float, dtype: torch.dtype) -> None:
    """m <- x at the first visit; then d = x - decay m, and m <- decay m + mean |d| sign(d). Steps may be skipped."""
    codec = SignDelta(SignDeltaConfig(decay=decay))
    ends = [CompressorState(), CompressorState()]
    memory: dict[int, Tensor] = {}
    for step in range(14):
        key = ((3 * step) % 8, (3 * step + 1) % 8)
        x = noise((S, 2, H), dtype, step)
        got, updates = send(codec, x, ends[0], ends[1], key), {}
        for column, sample in enumerate(key):
            expected = x[:, column]
            if sample in memory:
                base = memory[sample].to(torch.promote_types(dtype, torch.float32)) * decay
                difference = x[:, column] - base
                size = difference.abs().mean().float()
                expected = (base + torch.where(difference >= 0, size, -size)).to(dtype)
            assert torch.equal(got[:, column], expected)
            updates[sample] = expected
        for state in ends:
            state.rollback() if step % 5 == 4 else state.commit()
        memory |= {} if step % 5 == 4 else updates
        sender, receiver = (state.export_tensors() for state in ends)
        assert all(torch.equal(sender[name], receiver[name]) for name in codec.traits.shared)
        if step == 9:
            ends = [save_and_load(state) for state in ends]


def test_a_known_sample_takes_one_bit_a_number() -> None:
    codec, state = SignDelta(), CompressorState()
    x = noise((S, 2, H), torch.float32, 0)
    assert codec.encode(x, state, (1, 2)).nbytes == 4 * 2 * S * H
    assert codec.encode(x, state, (2, 3)).nbytes == 4 * S * H + 4 + 5
    assert codec.encode(x, state, (1, 2)).nbytes == 2 * (4 + 5)


def test_it_announces_all_launches() -> None:
    for end in _messages(SignDelta(SignDeltaConfig(cache=20))):
        assert end.surprises == []
        assert end.knew


def test_a_plug_in_may_postpone_its_annotations() -> None:
    """A dataclass of a file with ``from __future__ import annotations`` looks for its module in ``sys.modules``."""
    path = sign_delta.__file__
    assert path is not None
    check_compressor(build_registry([path])["sign-delta"])
