"""Which ranks measure a link together, and what counts of their measurements."""

from __future__ import annotations

import math

import pytest

from megatron.planner.links import find_peer, next_message_bytes
from megatron.planner.measure import combine_rows


@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (4, 2), (6, 3), (6, 2), (12, 4), (5, 1)])
def test_every_link_between_neighbors_is_measured_and_no_other(world: int, per_node: int) -> None:
    """Inside nodes between ranks of a node, and between neighboring nodes at the same place of both."""
    nodes = world // per_node
    inside = {(r, r + 1) for r in range(world - 1) if r // per_node == (r + 1) // per_node}
    across = {(r, r + per_node) for r in range(world - per_node)}
    for stride, count, expected in ((1, per_node, inside), (per_node, nodes, across)):
        measured = set()
        for shift in range(min(count - 1, 2)):
            for rank in range(world):
                peer = find_peer(rank, stride, count, shift)
                if peer is not None:
                    assert find_peer(peer, stride, count, shift) == rank
                    measured.add((min(rank, peer), max(rank, peer)))
        assert measured == expected


def test_the_slowest_link_and_the_mean_device_count() -> None:
    rows = [[10.0, 5.0, 1.0, 2.0], [4.0, 9.0, 3.0, math.nan], [math.nan, math.nan, 5.0, 4.0]]
    combined = combine_rows(["across_gbit", "across_us", "op_us", "layer forward"], rows)
    assert combined == {"across_gbit": 4.0, "across_us": 9.0, "op_us": 3.0, "layer forward": 3.0}


@pytest.mark.parametrize(
    ("nbytes", "seconds", "expected"),
    [
        (1 << 17, 0.05, 1 << 17),  # long enough
        (1 << 17, 0.049, 1 << 18),
        (1 << 17, 0.02, 1 << 19),
        (1 << 17, 1e-5, 1 << 21),
        (1 << 25, 1e-5, 1 << 26),
        (1 << 26, 1e-5, 1 << 26),
    ],
)
def test_messages_grow_until_they_are_long_enough(nbytes: int, seconds: float, expected: int) -> None:
    assert next_message_bytes(nbytes, seconds) == expected
