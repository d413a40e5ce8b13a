"""Orthonormalization and first factors: what the published Gram-Schmidt and seeding get wrong."""

from __future__ import annotations

import pytest
import torch

from megatron.compression.linalg import matrix_shape, random_bases
from megatron.kernels.ops import orthonormalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_columns_are_orthonormal_whatever_the_rank_of_the_input(rank: int, dtype: torch.dtype) -> None:
    """Gram-Schmidt returns columns of noise that are not orthogonal once the input's rank is used up."""
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(5, 40, max(rank, 1), generator=generator, dtype=dtype)
    right = torch.randn(5, max(rank, 1), 8, generator=generator, dtype=dtype)
    x = left @ right if rank else torch.zeros(5, 40, 8, dtype=dtype)
    q = orthonormalize(x)
    eye = torch.eye(8, dtype=dtype).expand(5, 8, 8)
    torch.testing.assert_close(q.transpose(1, 2) @ q, eye, atol=2e-6, rtol=0)
    # What the input spans is spanned: its projection is itself.
    torch.testing.assert_close(q @ (q.transpose(1, 2) @ x), x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_sizes_do_not_matter(scale: float) -> None:
    """An epsilon in the norm makes the columns of small gradients too short."""
    x = torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(0))
    q = orthonormalize(x * scale)
    torch.testing.assert_close(q.transpose(1, 2) @ q, torch.eye(4).expand(1, 4, 4), atol=2e-6, rtol=0)


def test_first_factors_depend_on_seed_and_name_alone() -> None:
    """Seeding the global generator would correlate dropout with compression."""
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


def test_a_message_without_state_gets_the_matrix_that_is_there() -> None:
    """Each all-reduce of tensor-parallel ranks asks for one; a copy to a GPU would make the host wait."""
    like = torch.zeros(1)
    first = random_bases(1, 12, 3, 714, "a", like)
    assert random_bases(1, 12, 3, 714, "a", like) is first
    assert random_bases(1, 12, 3, 714, "a", like.double()).dtype is torch.float64
    assert not torch.equal(random_bases(1, 12, 3, 714, "b", like), first)
