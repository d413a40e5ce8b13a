"""The Mersenne Twister generators of the C++ standard library, and a shuffle, as NumPy arrays.

megatron-core cuts sentences into samples in C++, with std::mt19937 and std::mt19937_64; the same samples need the
same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16
_WORDS, _MIDDLE = 312, 156
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
# Below this many elements, swaps run sequentially.
_SEQUENTIAL_SWAPS = 4096


def mersenne_32(seed: int) -> Iterator[NDArray[np.uint32]]:
    """Outputs of std::mt19937(seed), in blocks."""
    random = np.random.RandomState(seed & 0xFFFFFFFF)
    while True:
        yield random.randint(0, 1 << 32, size=_BLOCK, dtype=np.uint32)


def mersenne_64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """Outputs of std::mt19937_64(seed), in blocks."""
    word = seed & 0xFFFFFFFFFFFFFFFF
    words = [word]
    for index in range(1, _WORDS):
        word = (6364136223846793005 * (word ^ (word >> 62)) + index) & 0xFFFFFFFFFFFFFFFF
        words.append(word)
    state = np.array(words, dtype=np.uint64)
    while True:
        block = np.empty((_BLOCK // _WORDS, _WORDS), dtype=np.uint64)
        for row in block:
            # Each half of the state advances from the other half.
            state[:_MIDDLE] = _twist(state[:_MIDDLE], state[1 : _MIDDLE + 1]) ^ state[_MIDDLE:]
            next_words = np.append(state[_MIDDLE + 1 :], state[0])
            state[_MIDDLE:] = _twist(state[_MIDDLE:], next_words) ^ state[:_MIDDLE]
            row[:] = state
        numbers = block.reshape(-1)
        numbers ^= (numbers >> np.uint64(29)) & np.uint64(0x5555555555555555)
        numbers ^= (numbers << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        numbers ^= (numbers << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        numbers ^= numbers >> np.uint64(43)
        yield numbers


def _twist(words: NDArray[np.uint64], next_words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    joined_words = (words & _UPPER) | (next_words & _LOWER)
    return (joined_words >> np.uint64(1)) ^ ((joined_words & np.uint64(1)) * _MATRIX)


def shuffle_range(count: int, random: Iterator[NDArray[np.uint64]]) -> NDArray[Any]:
    """Fisher-Yates shuffle of [0, count): swaps i with a random number modulo (i + 1), from count - 1 down to 1.

    Swaps without common elements run as a batch.
    """
    order = np.arange(count, dtype=np.uint32 if count < 1 << 32 else np.int64)
    top = count - 1
    while top > 0:
        numbers = next(random)[:top]
        positions = np.arange(top, top - len(numbers), -1, dtype=np.int64)
        partners = (numbers % (positions + 1).astype(np.uint64)).astype(np.int64)
        start = 0
        while start < len(positions):
            highest = int(positions[start])
            if highest < _SEQUENTIAL_SWAPS:
                head = order[: highest + 1].tolist()
                for position, partner in zip(positions[start:].tolist(), partners[start:].tolist(), strict=True):
                    head[position], head[partner] = head[partner], head[position]
                order[: highest + 1] = head
                break
            size = _count_independent(partners[start : start + isqrt(highest)], highest)
            swap_positions, swap_partners = positions[start : start + size], partners[start : start + size]
            order[swap_positions], order[swap_partners] = order[swap_partners], order[swap_positions]
            start += size
        top -= len(numbers)
    return order


def _count_independent(partners: NDArray[np.int64], top: int) -> int:
    """Number of leading swaps, from ``top`` downwards with these partners, without common elements."""
    size = len(partners)
    # Partners that are themselves swapped later in this batch.
    turns = top - partners
    later_turns = turns[(turns < size) & (turns > np.arange(size))]
    if len(later_turns):
        size = int(later_turns.min())
    ranks = np.argsort(partners, kind="stable")
    sorted_partners = partners[ranks]
    repeated_ranks = ranks[1:][sorted_partners[1:] == sorted_partners[:-1]]
    return min(size, int(repeated_ranks.min())) if len(repeated_ranks) else size
