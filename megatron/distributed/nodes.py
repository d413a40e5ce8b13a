"""Groups of ranks cut by node, for sums in two levels and rows in two stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from megatron.distributed.group import Group, NodeSplit

Positions = tuple[tuple[int, ...], ...]
"""Positions in a group, by node."""
MakeGroups = Callable[[Iterable[tuple[int, ...]], str], Group | None]
"""Makes the groups of these ranks, and returns this rank's group; all ranks must make the same calls."""


def positions_by_node(groups: Sequence[tuple[int, ...]], node_of: Sequence[str]) -> tuple[Positions, str]:
    """Cut the groups of a kind by node: into blocks of equal size, at the same positions in all groups.

    The ranks of a node form a block, or several if nodes hold different numbers of ranks: the block size is the
    greatest that divides all of these numbers. Groups that are placed on nodes in different ways are not cut, because
    tensor-parallel ranks must get equal sums of replicated tensors.

    Args:
        groups: global ranks of each group, in group order; groups of equal size.
        node_of: the node of each global rank.

    Returns:
        The positions, and the reason why the blocks are not all ranks of several nodes; empty if they are.
    """
    by_node: list[list[list[int]]] = []
    for ranks in groups:
        nodes: dict[str, list[int]] = {}
        for position, rank in enumerate(ranks):
            nodes.setdefault(node_of[rank], []).append(position)
        by_node.append(list(nodes.values()))
    counts = sorted({len(node) for group in by_node for node in group}, reverse=True)
    block = math.gcd(*counts)
    cuts = {
        tuple(tuple(node[i : i + block]) for node in group for i in range(0, len(node), block)) for group in by_node
    }
    size = len(groups[0])
    if len(cuts) > 1:
        return tuple((position,) for position in range(size)), "its groups lie on nodes in different ways"
    (common_cut,) = cuts
    if len(counts) > 1:
        return common_cut, f"nodes hold {' or '.join(map(str, counts))} of its {size} ranks"
    if block == size:
        return common_cut, f"its {size} ranks are on one node"
    return common_cut, f"its {size} ranks are on nodes of their own" if block == 1 else ""


def describe_sums(split: NodeSplit) -> str:
    """Describe for people how a group's sums use its nodes."""
    block, count = len(split.nodes[0]), len(split.nodes)
    if count == 1:
        return f"{split.reason}, so its sums have one level, inside it"
    if block == 1:
        return f"{split.reason}, so its sums have one level, between nodes"
    blocks = f"{count} {'blocks' if split.reason else 'nodes'}"
    return f"{split.reason}{', ' if split.reason else ''}sums in two levels: {block} ranks of a node, then {blocks}"


def split_by_node(
    group: Group | None,
    groups: Sequence[tuple[int, ...]],
    node_of: Sequence[str],
    make: MakeGroups,
) -> None:
    """Set the group's ranks by node. Every rank of the world must call this, even if it is in none of the groups.

    A subgroup that is the whole group, or a single rank, needs no separate process group.

    Args:
        group: this rank's group of the kind; None if it is in none.
        groups: all groups of the kind.
        node_of: the node of each global rank.
        make: makes the groups of the parts.
    """
    positions, why = positions_by_node(groups, node_of)
    columns = [tuple(sorted(column)) for column in zip(*positions, strict=True)]  # sorted like torch's groups
    subgroups = []
    for suffix, blocks in (("in a node", positions), ("between nodes", columns)):
        ranks_of_parts = [tuple(ranks[at] for at in members) for ranks in groups for members in blocks]
        name = f"{group.name if group is not None else ''} {suffix}".strip()
        if len(blocks) == 1:
            subgroups.append(group)
        elif len(blocks[0]) == 1:
            subgroups.append(group and Group(None, (group.ranks[group.rank],), 0, name, group.backend))
        else:
            subgroups.append(make(ranks_of_parts, name))
    if group is not None:
        node, across = subgroups
        assert node is not None
        assert across is not None
        group.split = NodeSplit(positions, node, across, why)
