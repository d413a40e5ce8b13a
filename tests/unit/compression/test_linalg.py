"""Orthonormalization and first factors, in the cases where the published code is wrong."""

from __future__ import annotations

import pytest
import torch

from megatron.compression.linalg import matrix_shape, random_bases
from megatron.kernels.ops import orthonormalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_columns_are_orthonormal_for_an_input_of_any_rank(rank: int, dtype: torch.dtype) -> None:
    """Beyond the rank of the input, Gram-Schmidt would return noise that is not orthogonal."""
    generator = torch.Generator().manual_seed(rank)
    tall = torch.randn(5, 40, max(rank, 1), generator=generator, dtype=dtype)
    wide = torch.randn(5, max(rank, 1), 8, generator=generator, dtype=dtype)
    x = tall @ wide if rank else torch.zeros(5, 40, 8, dtype=dtype)
    q = orthonormalize(x)
    eye = torch.eye(8, dtype=dtype).expand(5, 8, 8)
    torch.testing.assert_close(q.transpose(1, 2) @ q, eye, atol=2e-6, rtol=0)
    # The projection of the input is the input.
    torch.testing.assert_close(q @ (q.transpose(1, 2) @ x), x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_columns_are_orthonormal_at_any_scale(scale: float) -> None:
    """With an epsilon in the norm, columns of small gradients would be too short."""
    x = torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(0))
    q = orthonormalize(x * scale)
    torch.testing.assert_close(q.transpose(1, 2) @ q, torch.eye(4).expand(1, 4, 4), atol=2e-6, rtol=0)


def test_first_factors_depend_on_seed_and_name_alone() -> None:
    """The global generator is not seeded, which would correlate dropout with compression."""
    like = torch.zeros(1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = random_bases(2, 12, 3, 714, "a", like)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(random_bases(2, 12, 3, 714, "a", like), first)
    assert not torch.equal(random_bases(2, 12, 3, 714, "b", like), first)
    assert not torch.equal(random_bases(2, 12, 3, 715, "a", like), first)
    assert not torch.equal(first[0], first[1])


def test_matrix_shapes() -> None:
    assert matrix_shape((3, 4)) == (3, 4)
    assert matrix_shape((3, 4, 5)) in {(3, 20), (12, 5)}
    assert matrix_shape(torch.Size((16, 2, 8)))[0] * matrix_shape(torch.Size((16, 2, 8)))[1] == 256


def test_equal_first_factors_share_a_tensor() -> None:
    """Each tensor-parallel all-reduce needs a first factor, and a copy to a GPU would make the host wait."""
    like = torch.zeros(1)
    first = random_bases(1, 12, 3, 714, "a", like)
    assert random_bases(1, 12, 3, 714, "a", like) is first
    assert random_bases(1, 12, 3, 714, "a", like.double()).dtype is torch.float64
    assert not torch.equal(random_bases(1, 12, 3, 714, "b", like), first)
