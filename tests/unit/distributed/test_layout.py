"""Rank arithmetic against numpy's indexing of a (pp, dp, tp) array."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.distributed.layout import Coordinates, Layout, Tie

layouts = st.builds(Layout, tp=st.integers(1, 5), pp=st.integers(1, 5), dp=st.integers(1, 5), chunks=st.integers(1, 4))


def _grid(layout: Layout) -> np.ndarray:
    return np.arange(layout.world_size).reshape(layout.pp, layout.dp, layout.tp)


@given(layouts)
def test_ranks_are_ordered_by_pipeline_data_and_tensor_parallelism(layout: Layout) -> None:
    grid = _grid(layout)
    for (pp, dp, tp), rank in np.ndenumerate(grid):
        assert layout.coordinates(int(rank)) == Coordinates(tp=tp, dp=dp, pp=pp)
        assert layout.rank_of(tp=tp, dp=dp, pp=pp) == rank


@given(layouts)
def test_groups_are_the_lines_of_the_grid(layout: Layout) -> None:
    grid = _grid(layout)
    for groups, axis in ((layout.tp_groups(), 2), (layout.dp_groups(), 1), (layout.pp_groups(), 0)):
        lines = {tuple(line) for line in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()}
        ranks_of_groups = list(groups)
        assert set(ranks_of_groups) == lines
        assert sorted(rank for group in ranks_of_groups for rank in group) == list(range(layout.world_size))


@given(layouts, st.integers(1, 5), st.booleans())
def test_groups_of_experts_cover_all_ranks(layout: Layout, shares: int, folded: bool) -> None:
    """Over replicas, or folded over tensor-parallel ranks first; both kinds form a grid in each stage."""
    ep = shares * layout.tp if folded else shares
    layout = replace(layout, dp=layout.dp * shares, ep=ep, folded=folded)
    shared, equal = list(layout.ep_groups()), list(layout.expert_dp_groups())
    assert {len(group) for group in shared} == {ep}
    for groups in (shared, equal):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            coordinates = [layout.coordinates(rank) for rank in group]
            assert len({at.pp for at in coordinates}) == 1
            assert folded or len({at.tp for at in coordinates}) == 1
    assert all(len(set(first) & set(second)) <= 1 for first in shared for second in equal)
    for group in shared:
        assert not folded or {layout.coordinates(rank).tp for rank in group} == set(range(layout.tp))


@given(layouts)
def test_embedding_groups_are_the_ends_of_the_pipelines(layout: Layout) -> None:
    grid = _grid(layout)
    ends = zip(grid[0].ravel().tolist(), grid[-1].ravel().tolist(), strict=True)
    assert set(layout.embedding_groups()) == {tuple(dict.fromkeys(pair)) for pair in ends}
    assert layout.ties == ((Tie.WORDS,) if layout.pp > 1 else ())


@given(layouts, st.integers(1, 3))
def test_an_encoder_decoder_ties_inputs_and_output(layout: Layout, decoder: int) -> None:
    layout = replace(layout, pp=layout.pp + decoder, decoder=decoder)
    grid = _grid(layout)
    at = {Tie.WORDS: sorted({0, decoder, layout.pp - 1}), Tie.POSITIONS: [0, decoder]}
    assert set(layout.ties) == set(at)
    for tie, stages in at.items():
        rows = grid[stages]
        assert set(layout.embedding_groups(tie)) == {tuple(ranks) for ranks in rows.reshape(len(stages), -1).T.tolist()}
        for ranks in layout.fused_embedding_groups(tie):
            (tp,) = {layout.coordinates(rank).tp for rank in ranks}
            assert sorted(ranks) == sorted(rows[:, :, tp].ravel().tolist())
    alone = [layout.follows_encoder(stage) for stage in range(layout.pp)]
    assert alone == [False] * decoder + [True] * (layout.pp - decoder)


@given(layouts)
def test_virtual_stages_alternate_between_ranks(layout: Layout) -> None:
    order = [layout.virtual_stage(pp, chunk) for chunk in range(layout.chunks) for pp in range(layout.pp)]
    assert order == list(range(layout.num_virtual_stages))


@given(layouts, st.booleans())
def test_places_are_those_of_the_virtual_stages(layout: Layout, v_shaped: bool) -> None:
    layout = replace(layout, v_shaped=v_shaped)
    for pp in range(layout.pp):
        places = [layout.place_of(stage) for stage in layout.virtual_stages(pp)]
        assert places == [(pp, chunk) for chunk in range(layout.chunks)]
    for boundary in range(layout.num_virtual_stages - 1):
        ends = layout.place_of(boundary)[0], layout.place_of(boundary + 1)[0]
        assert layout.ends_of(boundary, forward=True) == ends == layout.ends_of(boundary, forward=False)[::-1]
        assert layout.crosses(boundary) == (ends[0] != ends[1])


@given(layouts)
def test_in_v_form_the_first_and_the_last_stage_are_on_the_first_rank(layout: Layout) -> None:
    """Neighbors are next to each other, but for the turns, which no message crosses; a rank has one embedding."""
    layout = replace(layout, chunks=2, v_shaped=True)
    assert layout.place_of(0) == (0, 0)
    assert layout.place_of(layout.num_virtual_stages - 1) == (0, 1)
    crossing = [boundary for boundary in range(layout.num_virtual_stages - 1) if layout.crosses(boundary)]
    assert crossing == [boundary for boundary in range(2 * layout.pp - 1) if boundary != layout.pp - 1]
    for boundary in crossing:
        sender, receiver = layout.ends_of(boundary, forward=True)
        assert receiver - sender == (1 if boundary < layout.pp else -1)
    assert layout.ties == ()
