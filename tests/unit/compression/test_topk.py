"""Top-K sums against reference implementations in plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.base.errors import UserError
from megatron.compression.builtin import BUILTIN
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback
from megatron.compression.lockstep import run_lockstep
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_spec
from megatron.compression.state import CompressorState
from megatron.compression.topk import DisagreementError, StableTopK, StableTopKConfig, TopK, TopKConfig
from megatron.kernels.ops import abs_topk, dilate
from tests.support.noise import seeded

SHAPE = (2, 4, 5)
RANKS = 3


def _choice(update: np.ndarray, density: float, radius: int) -> np.ndarray:
    """Mask of the largest magnitudes of each parameter and of their neighbors."""
    mask = np.zeros(update.shape, dtype=bool)
    for row, values in zip(mask, np.abs(update), strict=True):
        best = sorted(range(len(values)), key=lambda i: (-values[i], i))[: max(int(density * len(values)), 1)]
        for i in best:
            row[max(i - radius, 0) : i + radius + 1] = True
    return mask


@pytest.mark.parametrize("flush", ["dump", "mean", "rotate"])
@pytest.mark.parametrize("radius", [0, 1])
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_stable_topk_matches_a_reference_loop(interval: int, radius: int, flush: str) -> None:
    density, n = 0.3, 20
    config = StableTopKConfig(density=density, interval=interval, range=radius, flush=flush)  # type: ignore[arg-type]
    compressor = ErrorFeedback(StableTopK(config))
    states = [CompressorState() for _ in range(RANKS)]
    residuals = np.zeros((RANKS, 2, n))
    mask = None
    velocity = np.zeros((2, n))
    for step in range(23):
        xs = [seeded(SHAPE, 100 * step + rank) for rank in range(RANKS)]
        g = np.stack([x.view(2, n).numpy().copy() for x in xs])
        total = run_lockstep(compressor, xs, states)[0].total.view(2, n).numpy()
        dense = mask is None or step % interval == 0
        if dense:
            share = 1.0 / interval if flush == "mean" else 1.0
            expected = (g + residuals * share).sum(axis=0)
            residuals[:] = 0.0
        else:
            assert mask is not None
            sent = mask.copy()
            if flush == "rotate":
                width = -(-2 * n // max(interval - 1, 1))
                turn = step % interval
                sent.reshape(-1)[(turn - 1) * width : turn * width] = True
            expected = np.where(sent, (g + residuals).sum(axis=0), 0.0)
            residuals = np.where(sent, 0.0, g + residuals)
        np.testing.assert_allclose(total, expected, atol=1e-12)
        velocity = 0.9 * velocity + total
        for state in states:
            compressor.observe(torch.from_numpy(velocity.copy()).view(SHAPE), state)
            state.commit()
        if dense:
            mask = _choice(velocity, density, radius)
        actual = np.stack([state.tensors[RESIDUAL].view(2, n).numpy() for state in states])
        np.testing.assert_allclose(actual, residuals, atol=1e-12)


def test_a_mean_flush_needs_the_whole_residual() -> None:
    """A decayed residual, less 1 - 1/interval of the whole one, would be sent with the wrong sign."""
    registry, length = Registry(BUILTIN), RunLength(1000)
    for flush in ("dump", "rotate"):
        read_spec(f"dp-grad=stable-topk,flush={flush},feedback-decay=0.5", registry, length)
    with pytest.raises(UserError, match=r"feedback-decay=0\.5: stable-topk itself scales the residual"):
        read_spec("dp-grad=stable-topk,flush=mean,feedback-decay=0.5", registry, length)


def test_ranks_with_different_masks_are_an_error() -> None:
    compressor = StableTopK(StableTopKConfig(density=0.2, interval=10))
    states = [CompressorState() for _ in range(2)]
    run_lockstep(compressor, [seeded(SHAPE, rank) for rank in range(2)], states)
    for rank, state in enumerate(states):
        compressor.observe(seeded(SHAPE, 50 + rank), state)
        state.commit()
    with pytest.raises(DisagreementError, match="different coordinates"):
        run_lockstep(compressor, [seeded(SHAPE, rank) for rank in range(2)], states)


@pytest.mark.parametrize("density", [0.01, 0.2, 1.0])
def test_topk_matches_a_reference_loop(density: float) -> None:
    n = 20
    compressor = ErrorFeedback(TopK(TopKConfig(density=density)))
    states = [CompressorState() for _ in range(RANKS)]
    residuals = np.zeros((RANKS, 2, n))
    for step in range(12):
        xs = [seeded(SHAPE, 100 * step + rank) for rank in range(RANKS)]
        g = np.stack([x.view(2, n).numpy().copy() for x in xs]) + residuals
        total = run_lockstep(compressor, xs, states)[0].total.view(2, n).numpy()
        masks = np.stack([_choice(row, density, 0) for row in g])
        np.testing.assert_allclose(total, np.where(masks, g, 0.0).sum(axis=0), atol=1e-12)
        residuals = np.where(masks, 0.0, g)
        for state in states:
            state.commit()


def test_ties_go_to_the_lower_index_and_non_finite_numbers_come_first() -> None:
    x = torch.tensor([[1.0, -1.0, 0.0, 1.0, torch.nan, -torch.inf]])
    assert abs_topk(x, 3).tolist() == [[0, 4, 5]]
    assert abs_topk(torch.zeros(2, 4), 2).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("radius", [0, 1, 3, 50])
def test_dilation_stays_in_its_row(radius: int) -> None:
    mask = torch.rand(3, 17, generator=torch.Generator().manual_seed(radius)) < 0.1
    expected = torch.zeros_like(mask)
    for row, column in mask.nonzero().tolist():
        expected[row, max(column - radius, 0) : column + radius + 1] = True
    assert torch.equal(dilate(mask, radius), expected)
