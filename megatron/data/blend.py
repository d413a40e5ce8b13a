"""Weighted blends of datasets: map draw number k to a dataset and a sample in it.

``MegatronBlend`` is megatron-core's greedy rule, which draws from the dataset furthest behind its share and stores
the draws in two arrays. ``LazyBlend`` tracks the shares at least equally well without any array.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.cache import Arrays, cached_arrays, check_memory
from megatron.data.permute import check_index

# Above this many draws, the greedy rule processes chunks in parallel, with the same result.
_SEQUENTIAL_DRAWS = 100_000
_CHUNKS = 2048
_WARM_UP = 512


class LazyBlend:
    """A blend computed on demand, in O(log D) integer operations per draw.

    The datasets are the leaves of a balanced binary tree. Of the first m draws that reach a node, the left child
    receives round(m * share) (halves up) and the right child the remainder. Neither count falls as m grows, so
    every draw reaches exactly one leaf, and the leaf's count is the draw's index within that dataset. Each level adds
    at most 1/2 to the deviation from the exact share, and lower levels scale it down. After any k draws a dataset has
    therefore been drawn w * k times, plus or minus at most ceil(log2 D) / 2: a tighter bound than that of Megatron's
    greedy rule. Shares are exact fractions, so long runs do not drift.

    Args:
        weights: positive weights; they need not sum to 1.
        num_samples: number of draws.
    """

    def __init__(self, weights: Sequence[float], num_samples: int) -> None:
        self._weights = [Fraction(weight) for weight in weights]
        self._num_samples = num_samples
        prefix = [Fraction(0)]
        for weight in self._weights:
            prefix.append(prefix[-1] + weight)
        self._shares: dict[tuple[int, int], Fraction] = {}
        stack = [(0, len(weights))]
        while stack:
            low, high = stack.pop()
            middle = (low + high) // 2
            if high - low > 1:
                self._shares[low, high] = (prefix[middle] - prefix[low]) / (prefix[high] - prefix[low])
                stack += [(low, middle), (middle, high)]

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        index, low, high = check_index(index, self._num_samples), 0, len(self._weights)
        while high - low > 1:
            middle = (low + high) // 2
            share = self._shares[low, high]
            left_draws = _round_half_up(index, share)
            if _round_half_up(index + 1, share) > left_draws:
                high, index = middle, left_draws
            else:
                low, index = middle, index - left_draws
        return low, index

    def counts(self) -> list[int]:
        """Number of draws from each dataset over the whole blend."""
        result = [0] * len(self._weights)
        stack = [(0, len(self._weights), self._num_samples)]
        while stack:
            low, high, draws = stack.pop()
            if high - low == 1:
                result[low] = draws
                continue
            left_draws = _round_half_up(draws, self._shares[low, high])
            stack += [(low, (low + high) // 2, left_draws), ((low + high) // 2, high, draws - left_draws)]
        return result


def _round_half_up(draws: int, share: Fraction) -> int:
    """round(draws * share), halves up, in integers."""
    return (2 * draws * share.numerator + share.denominator) // (2 * share.denominator)


class MegatronBlend:
    """megatron-core's blend, identical draw by draw. Weights are normalized to sum to 1, as there."""

    def __init__(self, weights: Sequence[float], num_samples: int, cache_path: str | Path | None = None) -> None:
        if len(weights) > np.iinfo(np.int16).max:
            raise UserError(f"a blend of {len(weights)} datasets: --sample-order megatron takes at most 32,767")
        shares = normalize(weights)
        identity: dict[str, Any] = {"weights": shares, "num_samples": num_samples}
        arrays = cached_arrays(cache_path, "gpt-blend", identity, lambda: greedy_blend(shares, num_samples))
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> tuple[int, int]:
        check_index(index, len(self))
        return int(self.dataset_index[index]), int(self.dataset_sample_index[index])


def normalize(weights: Sequence[float]) -> list[float]:
    """Normalize weights in float64, as megatron-core does."""
    array = np.array(weights, dtype=np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares


def greedy_blend(shares: list[float], num_samples: int, num_chunks: int = _CHUNKS) -> Arrays:
    """megatron-core's greedy rule: draw k goes to the first dataset with the largest share * max(k, 1) - draws.

    Long blends are split into chunks that are processed in parallel. Each chunk warms up from estimated counts some
    steps before its first draw. The counts after the warm-up are compared with the final counts of the previous
    chunk, and a chunk with a wrong estimate is recomputed, so the result is exact.

    Returns:
        dataset_index: int16 [num_samples]; dataset_sample_index: int64 [num_samples].
    """
    check_memory(12 * num_samples, "a blend", num_samples)
    dataset_index = np.zeros(num_samples, dtype=np.int16)
    if num_samples <= _SEQUENTIAL_DRAWS and num_chunks == _CHUNKS:
        _greedy_chunk(shares, [0] * len(shares), dataset_index, 0)
    else:
        _greedy_parallel(shares, dataset_index, num_chunks)
    sample_index = np.zeros(num_samples, dtype=np.int64)
    for dataset in range(len(shares)):
        mask = dataset_index == dataset
        sample_index[mask] = np.arange(int(np.count_nonzero(mask)))
    return {"dataset_index": dataset_index, "dataset_sample_index": sample_index}


def _greedy_chunk(shares: list[float], counts: list[int], choice: NDArray[np.int16], start: int) -> None:
    """Fill ``choice`` from draw ``start`` on; update ``counts``, the draws of each dataset before it."""
    datasets = range(len(shares))
    for draw in range(start, start + len(choice)):
        position = float(max(draw, 1))
        best, best_error = 0, shares[0] * position - counts[0]
        for dataset in datasets:
            error = shares[dataset] * position - counts[dataset]
            if error > best_error:
                best, best_error = dataset, error
        choice[draw - start] = best
        counts[best] += 1


def _greedy_parallel(shares: list[float], choice: NDArray[np.int16], num_chunks: int) -> None:
    shares_d = np.array(shares)
    length = max(1, -(-len(choice) // num_chunks))
    starts = np.arange(0, len(choice), length)
    warm_up_steps = min(_WARM_UP, length)
    begin = np.maximum(starts - warm_up_steps, 0)
    exact_sd = begin[:, None] * shares_d
    counts_sd = np.floor(exact_sd).astype(np.int64)
    # Missing draws go to the largest remainders, which approximates the greedy rule.
    rank_sd = np.argsort(np.argsort(counts_sd - exact_sd, axis=1, kind="stable"), axis=1)
    missing_s = begin - counts_sd.sum(axis=1)
    counts_sd += rank_sd < missing_s[:, None]
    rows = np.arange(len(starts))
    padded_sl = np.zeros((len(starts), length), dtype=np.int16)
    estimated_sd = counts_sd.copy()
    for step in range(-warm_up_steps, length):
        if step == 0:
            estimated_sd = counts_sd.copy()
        draws_s = starts + step
        active = draws_s >= 0
        errors_sd = shares_d * np.maximum(draws_s, 1).astype(np.float64)[:, None] - counts_sd.astype(np.float64)
        best_s = np.argmax(errors_sd, axis=1)
        counts_sd[rows[active], best_s[active]] += 1
        if step >= 0:
            padded_sl[:, step] = best_s
    choice[:] = padded_sl.reshape(-1)[: len(choice)]
    true_counts = [0] * len(shares)
    for row, start in enumerate(starts.tolist()):
        chunk = choice[start : start + length]
        if true_counts == estimated_sd[row].tolist():
            true_counts = [
                int(a + b) for a, b in zip(true_counts, np.bincount(chunk, minlength=len(shares)), strict=True)
            ]
        else:
            _greedy_chunk(shares, true_counts, chunk, start)
