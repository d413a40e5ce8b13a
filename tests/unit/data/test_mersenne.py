"""C++'s generators by the values that its standard gives, and the shuffle against one swap after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.mersenne import mersenne_32, mersenne_64, shuffled


def test_the_ten_thousandth_numbers_are_the_standard_s() -> None:
    """ISO C++ [rand.predef]: of the default seed, 5489."""
    assert next(islice(chain.from_iterable(mersenne_32(5489)), 9999, None)) == 4123659995
    assert next(islice(chain.from_iterable(mersenne_64(5489)), 9999, None)) == 9981545732273789042


def blocks(seed: int, size: int) -> Iterator[NDArray[np.uint64]]:
    random = np.random.RandomState(seed)
    while True:
        yield random.randint(0, 1 << 64, size=size, dtype=np.uint64)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4095, 4096, 4097, 30_000])
def test_shuffled_is_one_swap_after_the_other(count: int) -> None:
    expected = list(range(count))
    numbers = chain.from_iterable(blocks(count, 7000))
    for place in range(count - 1, 0, -1):
        partner = int(next(numbers)) % (place + 1)
        expected[place], expected[partner] = expected[partner], expected[place]
    assert shuffled(count, blocks(count, 7000)).tolist() == expected


def test_swaps_that_meet_are_made_in_order() -> None:
    """Small partners only: nearly every swap touches an element that another one has touched."""
    count = 6000
    numbers = np.arange(count, dtype=np.uint64) % np.uint64(40)
    expected = list(range(count))
    for place in range(count - 1, 0, -1):
        partner = int(numbers[count - 1 - place]) % (place + 1)
        expected[place], expected[partner] = expected[partner], expected[place]
    assert shuffled(count, iter([numbers])).tolist() == expected
