"""Routes of rows to the ranks of experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.nodes import split_by_node
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.expert.dispatcher import ExpertComm


def _group(ranks: Sequence[int], rank: int, nodes: str) -> Group:
    def make(groups: Iterable[tuple[int, ...]], name: str) -> Group | None:
        mine = [group_ranks for group_ranks in groups if rank in group_ranks]
        return Group(None, mine[0], mine[0].index(rank), name, "none") if mine else None

    group = Group(None, tuple(ranks), ranks.index(rank), "expert-parallel", "none")
    split_by_node(group, [tuple(ranks)], nodes, make)
    return group


@pytest.mark.parametrize(
    ("nodes", "setting", "stages"),
    [
        ("aabb", "auto", 2),
        ("abba", "auto", 2),
        ("abab", "on", 2),
        ("aabbcc", "auto", 2),
        ("aaaabb", "auto", 2),
        ("abcd", "on", 2),
        ("aaab", "on", 2),
        ("abcd", "auto", 1),
        ("aaab", "auto", 1),
        ("aaaa", "on", 1),
        ("aabb", "off", 1),
    ],
)
def test_every_rank_is_reached_through_its_node(nodes: str, setting: str, stages: int) -> None:
    ranks = range(3, 3 + 2 * len(nodes), 2)
    node_of = "???" + "?".join(nodes)  # by global rank; only odd ranks are in the group
    comms = {
        rank: ExpertComm(_group(ranks, rank, node_of), Ledger(), CompressionPlan({}), setting)  # type: ignore[arg-type]
        for rank in ranks
    }
    for rank, comm in comms.items():
        assert (comm.nodes is not None) is (stages == 2)
        for position, target in enumerate(ranks):
            carrier = rank
            if comm.nodes is not None:
                carrier = comm.nodes.group.ranks[comm.node_of[position]]
                assert node_of[carrier] == node_of[target]
            assert comms[carrier].ranks.group.ranks[comm.index_in_node[position]] == target
        assert comm.ranks.inside is (comm.nodes is not None)
