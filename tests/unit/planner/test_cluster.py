"""Descriptions of clusters, and the time of messages and collectives on them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.distributed.layout import Layout
from megatron.planner.choice import Choice
from megatron.planner.cluster import (
    Cluster,
    Device,
    LinkSpec,
    Wire,
    format_assumed_rates,
    format_cluster,
    read_cluster,
    wire_between,
)
from megatron.planner.costs import wires_of

REPO = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.json"])
def test_a_written_cluster_is_read_back(name: str, tmp_path: Path) -> None:
    cluster = Cluster(
        "two nodes", 16, 8, Device("x", 100.0, 0.5, 24.0, 900.0, 4.0), LinkSpec(900.0, 2.0), LinkSpec(50.0, 9.0),
        {"layer forward": 1.25, "coding dp-grad=powersgd,rank=32": 0.7},
    )  # fmt: skip
    path = tmp_path / name
    path.write_text(format_cluster(cluster, path))
    assert read_cluster(path) == cluster


def test_a_file_in_json_may_have_tabs_and_exponents(tmp_path: Path) -> None:
    """Neither is YAML."""
    path = tmp_path / "cluster.json"
    path.write_text('{\n\t"gpus": 4,\n\t"device": {"peak_tflops": 1e2},\n\t"across": {"gbit_per_s": 5e-1}\n}\n')
    cluster = read_cluster(path)
    assert (cluster.gpus, cluster.device.peak_tflops, cluster.across.gbit_per_s) == (4, 100.0, 0.5)
    assert "device memory_gib" in format_assumed_rates(path, cluster)


@pytest.mark.parametrize("path", sorted((REPO / "examples" / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_complete(path: Path) -> None:
    cluster = read_cluster(path)
    assert cluster.gpus % cluster.gpus_per_node == 0
    assert format_assumed_rates(path, cluster) == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cluster.yaml", b"gpus: 0", "gpus must be a positive number, not 0"),
        ("cluster.yaml", b"gpus: 2.5", "gpus must be a whole number"),
        ("cluster.yaml", b"gpus: many", "gpus must be a positive number, not 'many'"),
        ("cluster.yaml", b"gpu: 8", "unknown name 'gpu'"),
        ("cluster.yaml", b"device: {peak_tflops: -1}", "device: peak_tflops must be a positive number"),
        ("cluster.yaml", b"device: {memory_gib: .inf}", "device: memory_gib must be a positive number"),
        ("cluster.yaml", b"inside: 5", "inside: expected names and values, not 5"),
        ("cluster.yaml", b"across: {gbps: 5}", "across: unknown name 'gbps'"),
        ("cluster.yaml", b"corrections: {layer: 1.0}", "corrections: 'layer' is none of"),
        ("cluster.yaml", b"corrections: {layer forward: 0}", "corrections must hold names and positive numbers"),
        ("cluster.yaml", b"gpus: [", "is not valid YAML"),
        ("cluster.yaml", b"device: {efficiency: 70}", "efficiency must be a share of the peak, at most 1, not 70"),
        ("cluster.yaml", b"name: [1]", "name must be text"),
        ("cluster.yaml", b"gpus: 1000000000000000", "gpus must be at most 1,000,000"),
        ("cluster.json", b"gpus: 4\n", "is not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        ("cluster.json", b"[4]", "expected names and values, not a list"),
        ("cluster.yaml", b"[4]", "expected names and values, not a list"),
        ("cluster.yaml", b"gpus:\t4\n\tname: x\n", "is not valid YAML (line 1"),
        ("cluster.png", b"\x89PNG\r\n\x1a\n", "is not UTF-8 text; give a YAML file"),
        ("cluster.sh", b"#!/bin/sh\necho 4\n", "expected names and values, not a str"),
        ("", b"", "cannot be read (Is a directory)"),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_cluster(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_counts_become_integers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("gpus: 8.0\ngpus_per_node: 4.0\n")
    assert isinstance(read_cluster(path).gpus, int)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml"):
        read_cluster(tmp_path / "none.yaml")


def test_an_operation_is_bound_by_compute_memory_or_launch() -> None:
    device = Device(peak_tflops=100.0, efficiency=0.5, memory_gbyte_per_s=1000.0, op_us=4.0)
    assert device.seconds(1e12, 1e9) == pytest.approx(0.02)
    assert device.seconds(1e6, 1e9) == pytest.approx(1e-3)
    assert device.seconds(1e6, 1e3) == pytest.approx(4e-6)


def test_collectives_take_the_time_of_a_ring() -> None:
    wire = Wire(1e9, 0.0)
    seconds = {"all-reduce": 1.5, "reduce-scatter": 0.75, "all-gather": 0.75, "all-to-all": 0.75, "broadcast": 1.0}
    assert {kind: wire.collective(kind, 1e9, 4) for kind in seconds} == pytest.approx(seconds)
    assert wire.collective("all-reduce", 1e9, 1) == 0.0
    slow = Wire(1e9, 1e-3)
    assert slow.collective("all-gather", 1e6, 4) == pytest.approx(3e-3 + 0.75e-3)
    # Small sums over many ranks go along a tree.
    assert slow.collective("all-reduce", 8, 1024) == pytest.approx(20e-3, rel=1e-3)
    assert slow.message(1e6) == pytest.approx(2e-3)


CLUSTER = Cluster("c", 32, 4, Device(), LinkSpec(800.0, 1.0), LinkSpec(80.0, 10.0))


@pytest.mark.parametrize(
    ("size", "stride", "gbyte_per_s", "per_node"),
    [
        (4, 1, 100.0, 4),  # a node
        (2, 1, 100.0, 2),  # half of a node
        (2, 2, 100.0, 2),
        (8, 1, 10.0, 4),  # all links of two nodes
        (8, 4, 2.5, 1),  # a rank in each of eight nodes, beside three such groups
        (4, 2, 5.0, 2),  # two ranks in each of two nodes, beside another such group
    ],
)
def test_a_group_gets_its_share_of_the_links(size: int, stride: int, gbyte_per_s: float, per_node: int) -> None:
    wire = wire_between(CLUSTER, size, stride)
    assert wire.bytes_per_s == pytest.approx(gbyte_per_s * 1e9)
    assert wire.per_node == per_node


@pytest.mark.parametrize(
    ("node", "tp", "dp", "pp", "crossing"),
    [(8, 4, 1, 4, 4), (4, 2, 1, 8, 6), (8, 1, 1, 16, 1), (4, 2, 2, 4, 12), (8, 2, 1, 4, 0), (8, 6, 1, 2, 4)],
)
def test_messages_between_stages_on_two_nodes_share_a_link(node: int, tp: int, dp: int, pp: int, crossing: int) -> None:
    layout = Layout(tp=tp, dp=dp, pp=pp)
    cluster = Cluster("c", layout.world_size, node, Device(), LinkSpec(800.0, 1.0), LinkSpec(80.0, 10.0))
    wires = wires_of(cluster, Choice(tp, pp, dp))
    hops = [
        (a // node != b // node, stage) for group in layout.pp_groups() for stage, (a, b) in enumerate(pairwise(group))
    ]
    assert sum(crosses for crosses, _ in hops) == crossing
    for stage in range(pp - 1):
        leaving = sum(crosses for crosses, sender in hops if sender == stage)
        wire = wires.hops[stage]
        assert (wire.per_node == 1) == (leaving > 0)
        assert wire.bytes_per_s == pytest.approx(100e9 if not leaving else 10e9 / min(leaving, node))
    ends = [group[0] // node != group[-1] // node for group in layout.pp_groups()]
    assert (wires.ends.per_node == 1) == any(ends)
    assert (wires.holders.bytes_per_s < 100e9) == any(ends)


def test_a_group_across_nodes_uses_the_slower_link() -> None:
    cluster = Cluster("c", 24, 8, Device(), LinkSpec(800.0, 1.0), LinkSpec(80.0, 10.0))
    assert wire_between(cluster, 3, 1).per_node == 2
    assert wire_between(cluster, 3, 1).bytes_per_s < 10e9


def test_strides_match_the_layout() -> None:
    layout = Layout(tp=2, pp=4, dp=4)
    assert {b - a for group in layout.tp_groups() for a, b in pairwise(group)} == {1}
    assert {b - a for group in layout.dp_groups() for a, b in pairwise(group)} == {2}
    assert {b - a for group in layout.pp_groups() for a, b in pairwise(group)} == {8}


def test_all_to_all_crosses_nodes_once_for_each_member() -> None:
    group = wire_between(dataclasses.replace(CLUSTER, gpus=8), 8, 1)
    # Each of the node's four ranks sends half of its bytes to the other node.
    assert group.collective("all-to-all", 1e9, 8) == pytest.approx(4 * 0.5e9 / 10e9, rel=1e-2)
