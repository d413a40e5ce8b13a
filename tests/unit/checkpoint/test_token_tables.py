"""Tables of means that several ranks have saved, put together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.compressor_state import _LoadableState, _Loaded
from megatron.checkpoint.state_slice import StateSlice
from megatron.compression.state import CompressorState
from megatron.compression.token_means import COUNTS, MEANS


def _wanted(kind: str, saved: tuple[int, int], now: tuple[int, int], at: tuple[int, int], cut: bool) -> _LoadableState:
    place = StateSlice("pp-forward.layer2.sender", CompressorState(), now, at, means={MEANS: COUNTS}, cut=cut)
    shape = (*saved, 5, 3) if kind == MEANS else (*saved, 5)
    return _LoadableState(place, kind, shape, torch.float32, torch.device("cpu"))


def _together(tables: list[Tensor], counts: list[Tensor]) -> tuple[Tensor, Tensor]:
    holders: Any = (len(tables), 1)
    means, seen = (_Loaded(_wanted(kind, holders, (1, 1), (0, 0), False)) for kind in (MEANS, COUNTS))
    for table, count in zip(tables, counts, strict=True):
        means.add_slice(table.clone(), count.clone())
        seen.add_slice(count.clone(), None)
    means.put()
    seen.put()
    found = [one.item.state_slice.state.tensors[one.item.kind] for one in (means, seen)]
    return found[0], found[1]


def test_a_mean_counts_as_often_as_it_has_seen_its_token() -> None:
    tables = [torch.randn((5, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    counts = [torch.tensor([0.0, 1, 2, 5, 0]), torch.tensor([0.0, 3, 0, 5, 7]), torch.tensor([0.0, 0, 0, 1, 1])]
    means_vh, counts_v = _together(tables, counts)
    total_vh = torch.stack([n.unsqueeze(1) * m for m, n in zip(tables, counts, strict=True)]).sum(dim=0)
    weight_v = torch.stack(counts).sum(dim=0)
    torch.testing.assert_close(means_vh[1:], total_vh[1:] / weight_v[1:].unsqueeze(1))
    assert counts_v.tolist() == [0, 3, 2, 5, 7]


def test_equal_tables_stay_what_they_are_bit_by_bit() -> None:
    table, count = torch.randn((5, 3)), torch.tensor([0.0, 1, 3, 7, 11])
    means_vh, counts_v = _together([table] * 3, [count] * 3)
    assert torch.equal(means_vh, table)
    assert torch.equal(counts_v, count)


def test_whose_tables_make_up_a_ranks_own() -> None:
    """Its own where there is one; of another layout all; where ranks must be equal, all of its replica."""
    for kind in (MEANS, COUNTS):
        every = [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert _wanted(kind, (2, 2), (2, 2), (1, 0), cut=True).sources == [(1, 0)]
        assert _wanted(kind, (2, 2), (2, 2), (1, 0), cut=False).sources == [(1, 0), (1, 1)]
        assert _wanted(kind, (2, 2), (4, 1), (3, 0), cut=False).sources == every
        assert _wanted(kind, (2, 2), (1, 2), (0, 1), cut=True).sources == [(0, 1), (1, 1)]
        assert _wanted(kind, (2, 1), (2, 2), (1, 1), cut=True).sources == [(1, 0)]
        assert _wanted(kind, (2, 2), (4, 1), (3, 0), cut=False).fits
