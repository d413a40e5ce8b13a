"""Fewer test cases than a full product of parameters; the product itself with ``--all-combinations``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, cycle, product
from typing import Any

all_combinations = False
"""Whether both functions return the full product: set by the option of pytest."""


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which each pair of values of any two parameters occurs, in a fixed order."""
    if all_combinations:
        return list(product(*parameters))
    choices = [range(len(values)) for values in parameters]
    uncovered = {
        ((i, a), (j, b)) for i, j in combinations(range(len(parameters)), 2) for a, b in product(choices[i], choices[j])
    }
    rows = []
    while uncovered:
        row = dict(min(uncovered))
        for i, values in enumerate(choices):
            if i not in row:
                gains = [sum(tuple(sorted(((i, a), item))) in uncovered for item in row.items()) for a in values]
                row[i] = gains.index(max(gains))
        uncovered -= set(combinations(sorted(row.items()), 2))
        rows.append(tuple(values[row[i]] for i, values in enumerate(parameters)))
    return rows


def in_turn(variants: Sequence[tuple[Any, ...]], *parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Variants, each with a combination of the parameters."""
    rows = list(product(*parameters))
    if all_combinations:
        return [(*variant, *row) for variant, row in product(variants, rows)]
    return [(*variant, *row) for variant, row in zip(variants, cycle(rows), strict=False)]
