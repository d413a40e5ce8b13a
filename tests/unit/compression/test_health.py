"""Health figures of residuals: norms and ages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Codec, Payload, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.error_feedback import ErrorFeedback, ErrorFeedbackCodec
from megatron.compression.lockstep import run_lockstep
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.state import CompressorState


class _Share(RoundCompressor):
    """Sends a fixed share of each number."""

    traits = SumTraits(batched=True)

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers):
        local = x * self.config
        total = yield Request(local.clone())
        return Aggregate(total, local)


def _run(share: float, steps: int) -> CompressorState:
    state = CompressorState()
    for step in range(steps):
        x = torch.randn((2, 3, 4), generator=torch.Generator().manual_seed(0)).mul_(1.0 + 0 * step)
        run_lockstep(ErrorFeedback(_Share(share)), [x], [state])
        state.commit()
    return state


def test_residuals_that_are_never_sent_age_by_a_step_each_step() -> None:
    health = _run(0.0, 7).health
    assert health is not None
    assert health.age_k.tolist() == [7.0, 7.0]
    assert (health.residual_k / health.gradient_k).sqrt().tolist() == pytest.approx([7.0, 7.0])


def test_an_exact_compressor_has_no_residual() -> None:
    health = _run(1.0, 3).health
    assert health is not None
    assert health.age_k.tolist() == [0.0, 0.0]
    assert health.residual_k.tolist() == [0.0, 0.0]


def test_a_compressor_that_sends_half_settles() -> None:
    """r = (g + r) / 2 tends to g; a quarter of the energy stays at each step, so the age (a + 1) / 4 tends to 1/3."""
    health = _run(0.5, 40).health
    assert health is not None
    assert (health.residual_k / health.gradient_k).sqrt().tolist() == pytest.approx([1.0, 1.0])
    assert health.age_k.tolist() == pytest.approx([1 / 3, 1 / 3])


def test_a_skipped_step_does_not_change_health() -> None:
    state = _run(0.0, 3)
    before = state.health
    run_lockstep(ErrorFeedback(_Share(0.0)), [torch.full((2, 3, 4), torch.inf)], [state])
    state.rollback()
    assert state.health is before


def test_messages_are_measured_at_the_sender() -> None:
    codec: Codec = ErrorFeedbackCodec(LowRankCodec(LowRankConfig(rank=1)))
    state = CompressorState()
    x = torch.randn((16, 12), generator=torch.Generator().manual_seed(1))
    payload: Payload = codec.encode(x, state, 0)
    residual = x - codec.decode(payload, x.shape, x.dtype, CompressorState(), 0)
    assert state.health is not None
    assert float(state.health.residual_k) == pytest.approx(float(residual.square().sum()), rel=1e-5)
    assert float(state.health.gradient_k) == pytest.approx(float(x.square().sum()), rel=1e-5)
