"""Residuals: conservation, and lazy error propagation against its formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback, ErrorFeedbackCodec
from megatron.compression.fixpoint import FixpointConfig, FixpointRounds
from megatron.compression.lockstep import run_lockstep
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.state import CompressorState
from tests.support.noise import seeded

ALGORITHMS = {
    "powersgd": lambda: PowerSGD(PowerSGDConfig(rank=2)),
    "powersgd, cold": lambda: PowerSGD(PowerSGDConfig(rank=1, warm_start=False)),
    "fixpoint": lambda: FixpointRounds(FixpointConfig(bits=2, group=8)),
    "fixpoint, 1 bit": lambda: FixpointRounds(FixpointConfig(bits=1, group=8)),
    "fixpoint, stochastic": lambda: FixpointRounds(FixpointConfig(bits=3, group=8, rounding="stochastic")),
    "bf16 factors": lambda: PowerSGD(PowerSGDConfig(rank=4, factors="bf16")),
    "8-bit factors": lambda: PowerSGD(PowerSGDConfig(rank=4, factors="fixpoint8")),
    "4-bit factors": lambda: PowerSGD(PowerSGDConfig(rank=4, factors="fixpoint4")),
}


@pytest.mark.parametrize("kind", ["local", "aggregate"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums_and_residuals_add_up_to_the_inputs(name: str, kind: Any) -> None:
    """Over 24 steps, two of them skipped: sum of sums + residuals = sum of the inputs of the taken steps. The residual
    does not grow."""
    ranks, shape = 3, (2, 41, 23) if "factors" in name else (2, 7, 5)  # whole and short groups
    compressor = ErrorFeedback(ALGORITHMS[name](), kind)
    states = [CompressorState() for _ in range(ranks)]
    inputs_sum, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    norms = []
    for step in range(24):
        xs = [seeded(shape, 1000 * step + rank) for rank in range(ranks)]
        step_taken = step % 10 != 7
        if step_taken:
            inputs_sum += torch.stack(xs).sum(dim=0)
        totals = [result.total for result in run_lockstep(compressor, xs, states, step_taken=step_taken)]
        assert all(torch.equal(total, totals[0]) for total in totals)
        sent += totals[0] * step_taken
        for state in states:
            state.commit() if step_taken else state.rollback()
        residual = torch.stack([state.tensors[RESIDUAL] for state in states]).sum(dim=0)
        torch.testing.assert_close(sent + residual, inputs_sum, rtol=0, atol=1e-10)
        norms.append(float(residual.norm()))
    assert min(norms) > 0
    assert max(norms[12:]) < 1.7 * max(norms[:12])  # a residual that grows at every step would double


def _orthonormal(x: np.ndarray) -> np.ndarray:
    return np.linalg.qr(x)[0]


@pytest.mark.parametrize("basis", ["tokens", "channels"])
@pytest.mark.parametrize("warm_start", [True, False])
def test_lazy_error_propagation_matches_a_reference_loop(warm_start: bool, basis: Any) -> None:
    """M <- M + e; P = orth(M orth(Q)); Q = M^T P; e <- M - P Q^T, carried over 20 messages, in fp64.

    With a basis of channels Q = orth(M^T P), and then P = M Q.
    """
    n, m, rank = 12, 7, 2
    codec = ErrorFeedbackCodec(LowRankCodec(LowRankConfig(rank=rank, warm_start=warm_start, basis=basis)))
    sender, receiver = CompressorState(), CompressorState()
    error = np.zeros((n, m))
    q = None
    for message in range(20):
        x = seeded((n, m), message).view(4, 3, m)
        payload = codec.encode(x, sender, message)
        got = codec.decode(payload, x.shape, x.dtype, receiver, message)
        if q is None or not warm_start:
            first = LowRankCodec(LowRankConfig(rank=rank)).encode(x, state := CompressorState(), 0)
            assert first.nbytes == payload.nbytes == rank * (n + m) * 8
            q = _first_q(m, rank, n)
            assert state.get("q") is not None
        matrix = x.reshape(n, m).numpy() + error
        p = _orthonormal(matrix @ _orthonormal(q))
        q = matrix.T @ p
        if basis == "channels":
            q = _orthonormal(q)
            p = matrix @ q
        expected = p @ q.T
        error = matrix - expected
        np.testing.assert_allclose(got.reshape(n, m).numpy(), expected, atol=1e-12)
        residual = sender.get(RESIDUAL)
        assert residual is not None
        np.testing.assert_allclose(residual.reshape(n, m).numpy(), error, atol=1e-12)
        sender.commit()
    assert receiver.empty


@pytest.mark.parametrize("factors", ["fp32", "bf16"])
def test_a_basis_of_channels_keeps_errors_within_their_tokens(factors: Any) -> None:
    """Half of a message is a thousandth of the other half, as in a decoder beside its encoder's text. With a basis of
    tokens the error of the large half would end up in the small half."""
    lost = {}
    for basis in ("tokens", "channels"):
        config = LowRankConfig(rank=2, factors=factors, basis=basis)
        codec = ErrorFeedbackCodec(LowRankCodec(config))
        state, small = CompressorState(), []
        for message in range(16):
            x = torch.cat([seeded((8, 32), message), seeded((16, 32), 99 - message) / 1000]).float()
            codec.encode(x, state, message)
            state.commit()
            small.append(float(state.tensors[RESIDUAL][8:].norm() / x[8:].norm()))
        lost[basis] = max(small)
    assert lost["channels"] < 5
    assert lost["tokens"] > 5 * lost["channels"]


def test_lazy_mean_conserves_the_mean_over_tokens() -> None:
    """Over the messages, the means of outputs and inputs over the tokens differ by the residual, (channels,)."""
    codec = ErrorFeedbackCodec(LowRankCodec(LowRankConfig(rank=1)), "lazy-mean")
    sender, receiver = CompressorState(), CompressorState()
    sent, input_mean = torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for message in range(50):
        x = seeded((4, 3, 7), message)
        got = codec.decode(codec.encode(x, sender, message), x.shape, x.dtype, receiver, message)
        sent += got.reshape(12, 7).mean(dim=0)
        input_mean += x.reshape(12, 7).mean(dim=0)
        residual = sender.get(RESIDUAL)
        assert residual is not None
        assert residual.shape == (7,)
        torch.testing.assert_close(sent + residual, input_mean, rtol=0, atol=1e-12)
        sender.commit()


def _first_q(m: int, rank: int, n: int) -> np.ndarray:
    from megatron.compression.linalg import random_bases

    start: np.ndarray = random_bases(1, m, rank, 714, f"{n}x{m}", torch.zeros(1, dtype=torch.float64))[0].numpy()
    return start


def test_a_rank_deficient_or_empty_matrix_is_sent_exactly() -> None:
    """Gram-Schmidt would normalize rounding noise to columns that are not orthogonal."""
    codec = LowRankCodec(LowRankConfig(rank=4))
    for x in (torch.zeros(20, 16), torch.outer(seeded((20,), 0), seeded((16,), 1)).float()):
        state = CompressorState()
        for message in range(3):
            y = codec.decode(codec.encode(x, state, message), x.shape, x.dtype, state, message)
            torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)
            q = state.get("q")
            assert q is not None
            assert torch.isfinite(q).all()


def test_a_skipped_step_leaves_residuals_and_factors_finite() -> None:
    compressor = ErrorFeedback(PowerSGD(PowerSGDConfig(rank=2)))
    states = [CompressorState(), CompressorState()]
    for step in range(6):
        xs = [seeded((1, 8, 6), 2 * step + rank) for rank in range(2)]
        if step == 3:
            xs[1][0, 2, 2] = torch.inf
        total = run_lockstep(compressor, xs, states)[0].total
        finite = bool(torch.isfinite(total).all())
        assert finite == (step != 3)
        for state in states:
            state.commit() if finite else state.rollback()
    for state in states:
        assert all(torch.isfinite(tensor).all() for tensor in state.tensors.values())
