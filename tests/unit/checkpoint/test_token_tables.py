"""Tables of token means, merged from several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.checkpoint.compressor_state import _LoadableState
from megatron.checkpoint.state_slice import StateSlice
from megatron.compression.state import CompressorState
from megatron.compression.token_means import COUNTS, MEANS

Ranks = tuple[int, int]
"""Numbers of replicas and of ranks in each."""


def _item(kind: str, saved: Ranks, current: Ranks, at: Ranks, cut: bool) -> _LoadableState:
    state_slice = StateSlice("pp-forward.layer2.sender", CompressorState(), current, at, means={MEANS: COUNTS}, cut=cut)
    shape = (*saved, 5, 3) if kind == MEANS else (*saved, 5)
    return _LoadableState(state_slice, kind, shape, torch.float32, torch.device("cpu"))


def _merged(tables: list[Tensor], counts: list[Tensor]) -> tuple[Tensor, Tensor]:
    merged_means, merged_counts = (_item(kind, (len(tables), 1), (1, 1), (0, 0), False) for kind in (MEANS, COUNTS))
    for table, count in zip(tables, counts, strict=True):
        merged_means.add_slice(table.clone(), count.clone())
        merged_counts.add_slice(count.clone(), None)
    for loaded in (merged_means, merged_counts):
        assert loaded.value is not None
        loaded.write(loaded.value)
    tensors = [loaded.state_slice.state.tensors[loaded.kind] for loaded in (merged_means, merged_counts)]
    return tensors[0], tensors[1]


def test_means_are_weighted_by_their_counts() -> None:
    tables = [torch.randn((5, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    counts = [torch.tensor([0.0, 1, 2, 5, 0]), torch.tensor([0.0, 3, 0, 5, 7]), torch.tensor([0.0, 0, 0, 1, 1])]
    means_vh, counts_v = _merged(tables, counts)
    total_vh = torch.stack([n.unsqueeze(1) * m for m, n in zip(tables, counts, strict=True)]).sum(dim=0)
    weight_v = torch.stack(counts).sum(dim=0)
    torch.testing.assert_close(means_vh[1:], total_vh[1:] / weight_v[1:].unsqueeze(1))
    assert counts_v.tolist() == [0, 3, 2, 5, 7]


def test_equal_tables_are_unchanged_to_the_bit() -> None:
    table, count = torch.randn((5, 3)), torch.tensor([0.0, 1, 3, 7, 11])
    means_vh, counts_v = _merged([table] * 3, [count] * 3)
    assert torch.equal(means_vh, table)
    assert torch.equal(counts_v, count)


def test_sources_of_a_ranks_tables() -> None:
    """The rank's own table; all tables of another layout; all tables of the replica if its ranks must be equal."""
    for kind in (MEANS, COUNTS):
        every = [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert _item(kind, (2, 2), (2, 2), (1, 0), cut=True).sources == [(1, 0)]
        assert _item(kind, (2, 2), (2, 2), (1, 0), cut=False).sources == [(1, 0), (1, 1)]
        assert _item(kind, (2, 2), (4, 1), (3, 0), cut=False).sources == every
        assert _item(kind, (2, 2), (1, 2), (0, 1), cut=True).sources == [(0, 1), (1, 1)]
        assert _item(kind, (2, 1), (2, 2), (1, 1), cut=True).sources == [(1, 0)]
        assert _item(kind, (2, 2), (4, 1), (3, 0), cut=False).fits
