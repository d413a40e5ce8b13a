"""C++'s generators by the values in its standard, and the shuffle against sequential swaps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.mersenne import mersenne_32, mersenne_64, shuffle_range


def test_the_ten_thousandth_numbers_equal_the_standard() -> None:
    """ISO C++ [rand.predef], with the default seed 5489."""
    assert next(islice(chain.from_iterable(mersenne_32(5489)), 9999, None)) == 4123659995
    assert next(islice(chain.from_iterable(mersenne_64(5489)), 9999, None)) == 9981545732273789042


def blocks(seed: int, size: int) -> Iterator[NDArray[np.uint64]]:
    random = np.random.RandomState(seed)
    while True:
        yield random.randint(0, 1 << 64, size=size, dtype=np.uint64)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4095, 4096, 4097, 30_000])
def test_shuffled_equals_sequential_swaps(count: int) -> None:
    expected = list(range(count))
    numbers = chain.from_iterable(blocks(count, 7000))
    for index in range(count - 1, 0, -1):
        partner = int(next(numbers)) % (index + 1)
        expected[index], expected[partner] = expected[partner], expected[index]
    assert shuffle_range(count, blocks(count, 7000)).tolist() == expected


def test_overlapping_swaps_are_made_in_order() -> None:
    """Small partners only: nearly every swap touches an element of an earlier swap."""
    count = 6000
    numbers = np.arange(count, dtype=np.uint64) % np.uint64(40)
    expected = list(range(count))
    for index in range(count - 1, 0, -1):
        partner = int(numbers[count - 1 - index]) % (index + 1)
        expected[index], expected[partner] = expected[partner], expected[index]
    assert shuffle_range(count, iter([numbers])).tolist() == expected
