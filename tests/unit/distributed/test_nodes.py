"""Groups split by node."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatron.distributed.group import Group, NodeSplit
from megatron.distributed.layout import Layout
from megatron.distributed.nodes import Positions, describe_sums, positions_by_node, split_by_node


def blocks(*sizes: int) -> list[str]:
    """Nodes of consecutive ranks."""
    return [str(node) for node, size in enumerate(sizes) for _ in range(size)]


EIGHT = [tuple(range(8))]
CASES: dict[str, tuple[list[tuple[int, ...]], list[str], Positions, str]] = {
    "even nodes": (EIGHT, blocks(4, 4), ((0, 1, 2, 3), (4, 5, 6, 7)), "sums in two levels: 4 ranks of a node, then 2"),
    "one node": (EIGHT, blocks(8), (tuple(range(8)),), "its 8 ranks are on one node"),
    "nodes of one rank": ([(0, 1)], blocks(1, 1), ((0,), (1,)), "its 2 ranks are on nodes of their own"),
    "ranks in turns": ([(0, 1, 2, 3)], list("abab"), ((0, 2), (1, 3)), "2 ranks of a node, then 2 nodes"),
    "uneven, with a common size": ([tuple(range(6))], blocks(4, 2), ((0, 1), (2, 3), (4, 5)),
     "nodes hold 4 or 2 of its 6 ranks, sums in two levels: 2 ranks of a node, then 3 blocks"),
    "uneven without one": ([tuple(range(5))], blocks(3, 2), tuple((rank,) for rank in range(5)),
     "nodes hold 3 or 2 of its 5 ranks, so its sums have one level, between nodes"),
    "replicas of two tensor-parallel ranks": (list(Layout(tp=2, dp=4).dp_groups()), blocks(4, 4), ((0, 1), (2, 3)),
     "2 ranks of a node, then 2 nodes"),
    "tensor-parallel ranks that fill a node": (list(Layout(tp=4, dp=2).dp_groups()), blocks(4, 4), ((0,), (1,)),
     "its sums have one level, between nodes"),
    "stages on nodes of their own": (list(Layout(pp=2, dp=4).dp_groups()), blocks(2, 2, 2, 2), ((0, 1), (2, 3)),
     "2 ranks of a node, then 2 nodes"),
    "groups that lie differently": (
        list(Layout(tp=2, dp=4).dp_groups()),
        # Nodes of the first tensor-parallel rank's group: a, a, b, b; of the second's: a, b, a, b.
        ["a", "a", "a", "b", "b", "a", "b", "b"],
        ((0,), (1,), (2,), (3,)),
        "its groups lie on nodes in different ways",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_positions_of_ranks_on_nodes(name: str) -> None:
    groups, node_of, expected, note = CASES[name]
    positions, why = positions_by_node(groups, node_of)
    assert positions == expected
    alone = Group(None, (0,), 0, "", "none")
    assert note in describe_sums(NodeSplit(positions, alone, alone, why))
    for ranks in groups:
        assert all(len({node_of[ranks[at]] for at in block}) == 1 for block in positions)


def _split(groups: list[tuple[int, ...]], node_of: list[str], rank: int) -> tuple[Group, list[list[tuple[int, ...]]]]:
    """Split group of a rank, and the new groups that it has created."""
    new_groups: list[list[tuple[int, ...]]] = []

    def make(blocks_of_ranks: Iterable[tuple[int, ...]], name: str) -> Group | None:
        new_groups.append(list(blocks_of_ranks))
        mine = next((block for block in new_groups[-1] if rank in block), None)
        return None if mine is None else Group(None, mine, mine.index(rank), name, "gloo")

    ranks = next(ranks for ranks in groups if rank in ranks)
    group = Group(None, ranks, ranks.index(rank), "data-parallel", "gloo")
    split_by_node(group, groups, node_of, make)
    return group, new_groups


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_create_the_same_groups(name: str) -> None:
    groups, node_of, positions, _ = CASES[name]
    every = [_split(groups, node_of, rank) for rank in range(len(node_of))]
    assert all(new_groups == every[0][1] for _, new_groups in every)
    for rank, (group, _) in enumerate(every):
        assert group.split is not None
        node, across = group.split.node, group.split.across
        assert (node.ranks[node.rank], across.ranks[across.rank]) == (rank, rank)
        assert (node.size, across.size) == (len(positions[0]), len(positions))
        assert set(node.ranks) & set(across.ranks) == {rank}
        assert list(across.ranks) == sorted(across.ranks)


def test_no_groups_are_created_for_a_single_node_or_single_ranks() -> None:
    for node_of in (blocks(1, 1, 1, 1), blocks(4)):
        group, new_groups = _split([(0, 1, 2, 3)], node_of, 2)
        assert new_groups == []
        assert group.split is not None
        assert group in (group.split.node, group.split.across)
