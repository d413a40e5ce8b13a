"""Fewer test cases than a full product of parameters; the product itself with ``--all-combinations``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, cycle, product
from typing import Any

import pytest

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


THIRDS = range(3)


def in_third(number: int, third: int | None) -> bool:
    """Whether a case, by its number, belongs to a third of a long list of cases: runs of three; None is all."""
    return third is None or number // 3 % 3 == third


def mark_repeats(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which all but those to keep are marked ``repeats``.

    Args:
        cases: values of the parameters: tuples for several, or ``pytest.param``, which ``keep`` names by its id.
        keep: cases that together cover what the test shows.
    """
    cases = list(cases)
    names = [case.id if hasattr(case, "marks") else case for case in cases]
    unknown = [name for name in keep if name not in names]
    assert not unknown, f"no such cases: {unknown}"
    params = []
    for name, case in zip(names, cases, strict=True):
        if name in keep:
            params.append(case)
        elif hasattr(case, "marks"):
            params.append(pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.repeats]))
        else:
            params.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.repeats))
    return params
