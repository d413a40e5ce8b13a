"""Hashes, seeded permutations of [0, n) in constant memory, and checks of indices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK64 = (1 << 64) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_ROUNDS = 6


def mix(*values: int) -> int:
    """64-bit hash of integers: SplitMix64's finalizer, chained (Steele et al., OOPSLA 2014)."""
    state = _GOLDEN_RATIO
    for value in values:
        state = (state + (value & _MASK64)) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state = (state ^ (state >> 31)) + _GOLDEN_RATIO
    return state & _MASK64


def finalize(values_n: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer of each value."""
    values_n = (values_n ^ (values_n >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values_n = (values_n ^ (values_n >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values_n ^ (values_n >> np.uint64(31))


def hash_array(values_n: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each value."""
    return finalize(values_n * np.uint64(_GOLDEN_RATIO) + np.uint64(key & _MASK64))


def random_state(*values: int) -> np.random.RandomState:
    """A generator with a seed of ``mix``. NumPy guarantees that the legacy stream never changes: old runs resume."""
    seed = mix(*values)
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])


def check_index(index: int, count: int) -> int:
    """Check and return the index of a sample.

    Raises:
        IndexError: when it is outside [0, count).
    """
    if not 0 <= index < count:
        raise IndexError(f"sample {index} of {count}")
    return index


class Permutation:
    """Keyed permutation of [0, n), computed per index in constant time and memory.

    A balanced Feistel network over the smallest even number of bits that represents n, with cycle walking: outputs
    outside [0, n) are fed back, less than four times on average (Black and Rogaway, CT-RSA 2002).
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._half = max(1, ((max(n, 2) - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [mix(key, n, round_number) for round_number in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Image of ``index``.

        Raises:
            IndexError: when ``index`` is outside [0, n).
        """
        if not 0 <= index < self.n:
            raise IndexError(f"{index} is outside [0, {self.n})")
        while True:
            left_half, right_half = index >> self._half, index & self._mask
            for key in self._keys:
                value = ((right_half ^ key) * 0xBF58476D1CE4E5B9) & _MASK64
                value = ((value ^ (value >> 32)) * 0x94D049BB133111EB) & _MASK64
                left_half, right_half = right_half, left_half ^ ((value ^ (value >> 29)) & self._mask)
            index = (left_half << self._half) | right_half
            if index < self.n:
                return index
