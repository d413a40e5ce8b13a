"""Description of a cluster: rates of devices and links, read from YAML or filled in by ``measure``."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.documents import dump_yaml, read_json, read_yaml
from megatron.base.errors import UserError


@dataclass(frozen=True)
class Device:
    """A device: a GPU, or a process on CPUs.

    Args:
        name: display name of the device.
        peak_tflops: peak rate of matrix products in the training precision.
        efficiency: share of the peak that large products reach.
        memory_gib: memory available to a run.
        memory_gbyte_per_s: memory bandwidth of operations other than matrix products.
        op_us: minimum time of an operation (a kernel launch), microseconds.
    """

    name: str = "device"
    peak_tflops: float = 312.0
    efficiency: float = 0.6
    memory_gib: float = 40.0
    memory_gbyte_per_s: float = 1400.0
    op_us: float = 3.0

    @property
    def flops(self) -> float:
        """FLOP/s of large matrix products."""
        return self.peak_tflops * 1e12 * self.efficiency

    def seconds(self, flops: float, moved: float) -> float:
        """Time of an operation by the roofline model: bound by FLOPs, memory traffic, or the launch."""
        return max(flops / self.flops, moved / (self.memory_gbyte_per_s * 1e9), self.op_us * 1e-6)


@dataclass(frozen=True)
class LinkSpec:
    """Bandwidth and latency of a link.

    Args:
        gbit_per_s: payload bandwidth in each direction: per device inside a node, per node between nodes, per site
            between sites.
        latency_us: latency of a small message, microseconds.
    """

    gbit_per_s: float = 100.0
    latency_us: float = 10.0


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal devices in equal nodes.

    Args:
        name: display name of the cluster.
        gpus: number of devices.
        gpus_per_node: GPUs per node; ranks fill a node before the next.
        device: the device type.
        inside, across: the links in a node and between nodes.
        sites: number of equally sized sites with slower links between them; 1 for none.
        between_sites: the link of a whole site to the others.
        corrections: measured over predicted (``Device.seconds``) time, by part of the step (see ``STEP_PARTS``) and by
            compressor (``coding dp-grad=powersgd,rank=32``).
    """

    name: str = "cluster"
    gpus: int = 8
    gpus_per_node: int = 8
    device: Device = field(default_factory=Device)
    inside: LinkSpec = field(default_factory=lambda: LinkSpec(2000.0, 3.0))
    across: LinkSpec = field(default_factory=lambda: LinkSpec(200.0, 8.0))
    corrections: Mapping[str, float] = field(default_factory=dict)
    sites: int = 1
    between_sites: LinkSpec = field(default_factory=lambda: LinkSpec(1.0, 5000.0))

    @property
    def site_gpus(self) -> int:
        """Number of devices per site."""
        return self.gpus // self.sites

    def split_over_islands(self, islands: int) -> Cluster:
        """Return the part of the cluster that each of ``islands`` equal islands has."""
        return dataclasses.replace(self, gpus=self.gpus // islands, sites=max(self.sites // islands, 1))

    def correction(self, name: str) -> float:
        """Return the factor that scales a part's predicted time."""
        return self.corrections.get(name, 1.0)


MAX_GPUS = 1_000_000
"""Maximum number of GPUs in a plan."""

STEP_PARTS = (
    "embedding forward",
    "embedding backward",
    "layer forward",
    "layer backward",
    "experts forward",
    "experts backward",
    "head forward",
    "head backward",
    "tensor parallel",
    "optimizer",
)
"""Parts of a step with a separate correction."""

CODING = "coding "
"""Prefix of the correction names of compressors."""


@dataclass(frozen=True)
class Wire:
    """The share of the links available to a group of ranks.

    Args:
        bytes_per_s: bandwidth of a ring through the group, or of a message.
        latency_s: latency of a step of the ring.
        per_node: number of the group's members in each node.
        site: the wire between sites, where the group spans several; its ``per_node`` counts members per site.
    """

    bytes_per_s: float
    latency_s: float
    per_node: int = 1
    site: Wire | None = None

    def message(self, nbytes: float) -> float:
        """Seconds of a message."""
        return self.latency_s + nbytes / self.bytes_per_s

    def collective(self, kind: str, nbytes: float, size: int) -> float:
        """Seconds of a collective over ``size`` ranks.

        Args:
            kind: all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, gather or scatter.
            nbytes: bytes of the full tensor: the reduced, gathered or scattered tensor, or the data that a rank
                exchanges.
            size: number of ranks in the group.
        """
        if size == 1 or nbytes == 0:
            return 0.0
        if self.site is not None:
            # Node and site links transfer concurrently: the slower decides.
            within = dataclasses.replace(self, site=None)
            return max(within.collective(kind, nbytes, size), self.site.collective(kind, nbytes, size))
        transfer_s = nbytes / self.bytes_per_s
        share = (size - 1) / size * transfer_s
        hops = math.ceil(math.log2(size)) * self.latency_s
        ring = (size - 1) * self.latency_s
        if kind == "all-reduce":
            return min(2 * (ring + share), 2 * (hops + transfer_s))
        if kind == "all-to-all":
            # Traffic inside a node does not load its link; each member's traffic to other nodes does.
            crossing = self.per_node * (size - self.per_node) / size
            return ring + max(crossing, (size - 1) / size) * transfer_s
        if kind == "broadcast":
            return hops + transfer_s
        return ring + share


def wire_between(cluster: Cluster, size: int, stride: int) -> Wire:
    """Return the wire of a group of every ``stride``-th rank, while all such groups communicate.

    Args:
        cluster: the cluster.
        size: number of ranks in the group.
        stride: distance in ranks between consecutive members.
    """
    node = cluster.gpus_per_node
    # Groups occupy consecutive blocks of ranks; unless blocks fill nodes evenly, some group spans two nodes.
    if cluster.gpus <= node or node % (size * stride) == 0:
        return inside_wire(cluster, size)
    per_node = _count_members(size, stride, node)
    wire = across_wire(cluster, per_node, node / per_node)
    site = cluster.site_gpus
    if cluster.sites == 1 or site % (size * stride) == 0:
        return wire
    per_site = _count_members(size, stride, site)
    return dataclasses.replace(wire, site=site_wire(cluster, per_site, site / per_site))


def _count_members(size: int, stride: int, block: int) -> int:
    """Maximum number of members of a group of every ``stride``-th rank in a block that does not hold all members."""
    members = min(size, max(1, block // stride)) if stride < block else 1
    return max(size - 1, 1) if members == size else members


def site_wire(cluster: Cluster, per_site: int, flows: float) -> Wire:
    """Return the wire of a group that spans sites; see ``across_wire``."""
    link = cluster.between_sites
    return Wire(link.gbit_per_s * 1e9 / 8 / flows, link.latency_us * 1e-6, per_site)


def inside_wire(cluster: Cluster, size: int) -> Wire:
    """Return the wire of a group inside a node."""
    return Wire(cluster.inside.gbit_per_s * 1e9 / 8, cluster.inside.latency_us * 1e-6, size)


def across_wire(cluster: Cluster, per_node: int, flows: float) -> Wire:
    """Return the wire of a group that spans nodes.

    Args:
        cluster: the cluster.
        per_node: number of members in a node.
        flows: number of such groups that share a node's link.
    """
    share = cluster.across.gbit_per_s * 1e9 / 8 / flows
    inside = cluster.inside.gbit_per_s * 1e9 / 8
    return Wire(min(share, inside) if per_node > 1 else share, cluster.across.latency_us * 1e-6, per_node)


def hop_wire(cluster: Cluster, replica: int, stage: int, stages: int) -> Wire:
    """Return the wire of messages from a pipeline stage to the next (cyclic), while all ranks of the stage send.

    Args:
        cluster: the cluster.
        replica: number of ranks of a stage, which are consecutive.
        stage, stages: stage of the sender, and number of stages.
    """
    node = cluster.gpus_per_node
    first, following = stage * replica, (stage + 1) % stages * replica
    # Every message of a stage larger than a node leaves its node, so counting a single node suffices.
    crossing = sum((first + k) // node != (following + k) // node for k in range(min(replica, node)))
    if not crossing:
        return inside_wire(cluster, 2)
    wire = across_wire(cluster, 1, crossing)
    site = cluster.site_gpus
    leaving = sum((first + k) // site != (following + k) // site for k in range(min(replica, site)))
    if not leaving:
        return wire
    slow = site_wire(cluster, 1, leaving)
    return Wire(min(wire.bytes_per_s, slow.bytes_per_s), slow.latency_s, 1, slow)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a file in JSON, if its name ends in .json, or else in YAML.

    Raises:
        UserError: when the file is invalid; the message names the file and the mistake.
    """
    values = _read_values(path)
    nested = {"device": Device, "inside": LinkSpec, "across": LinkSpec, "between_sites": LinkSpec}
    built = {
        name: _section(nested[name], content, f"{path}: {name}") if name in nested else content
        for name, content in values.items()
    }
    corrections = built.pop("corrections", {})
    if not isinstance(corrections, dict) or not all(_is_positive(value) for value in corrections.values()):
        raise UserError(f"{path}: corrections must hold names and positive numbers")
    for name in corrections:
        if name not in STEP_PARTS and not str(name).startswith(CODING):
            raise UserError(f"{path}: corrections: {name!r} is none of {', '.join(STEP_PARTS)} or '{CODING}SPEC'")
    cluster: Cluster = _section(Cluster, built, str(path))
    return dataclasses.replace(cluster, corrections={str(k): float(v) for k, v in corrections.items()})


def format_assumed_rates(path: str | Path, cluster: Cluster) -> str:
    """Format a note on the rates that are missing from a cluster file, with the assumed defaults; "" for none.

    Raises:
        UserError: when the file describes no device at all.
    """
    values = _read_values(path)
    if "device" not in values:
        raise UserError(
            f"{path}: no device; add device: {{name: ..., peak_tflops: ..., efficiency: ..., memory_gib: ..., "
            "memory_gbyte_per_s: ..., op_us: ...}, or measure one with --measure"
        )
    sections = {
        "device": True,
        "inside": cluster.gpus_per_node > 1,
        "across": cluster.gpus > cluster.gpus_per_node,
        "between_sites": cluster.sites > 1,
    }
    assumed = []
    for section in (name for name, is_used in sections.items() if is_used):
        rates = getattr(cluster, section)
        content = values.get(section, {})
        assumed += [
            f"{section} {entry.name} {getattr(rates, entry.name):g}"
            for entry in dataclasses.fields(rates)
            if entry.name != "name" and entry.name not in content
        ]
    return f"note: {path} lacks some rates; these defaults are assumed: {', '.join(assumed)}\n" if assumed else ""


def check_sites(cluster: Cluster) -> None:
    """Check that sites have equal numbers of whole nodes.

    Raises:
        UserError: when they do not.
    """
    if cluster.sites > 1 and cluster.gpus % (cluster.sites * cluster.gpus_per_node):
        raise UserError(
            f"sites {cluster.sites}: {cluster.gpus} devices in nodes of {cluster.gpus_per_node} do not divide into "
            "equal sites of whole nodes; change sites, gpus or gpus_per_node in the cluster file, or --gpus"
        )


def format_cluster(cluster: Cluster, path: str | Path = "cluster.yaml") -> str:
    """Format a cluster as the text of the file ``path``, which ``read_cluster`` reads."""
    values = dataclasses.asdict(cluster)
    return json.dumps(values, indent=2) + "\n" if _is_json(path) else dump_yaml(values)


def _read_values(path: str | Path) -> dict[str, Any]:
    # YAML's loader refuses tabs, and takes numbers such as 1e9 for text.
    return read_json(path, str(path)) if _is_json(path) else read_yaml(path)


def _is_json(path: str | Path) -> bool:
    return Path(path).suffix.lower() == ".json"


def _section(kind: type[Any], content: object, context: str) -> Any:
    """Build a dataclass from a section; its numbers must be positive."""
    if not isinstance(content, dict):
        raise UserError(f"{context}: expected names and values, not {content!r}")
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    for name, value in content.items():
        if name not in fields:
            raise UserError(f"{context}: unknown name {name!r}; the names are {', '.join(fields)}")
        if fields[name].type in ("int", "float") and not _is_positive(value):
            raise UserError(f"{context}: {name} must be a positive number, not {value!r}")
        if fields[name].type == "str" and not isinstance(value, str):
            raise UserError(f"{context}: {name} must be text, not {value!r}")
        if name == "efficiency" and value > 1:
            raise UserError(f"{context}: efficiency must be a share of the peak, at most 1, not {value!r}")
        if name in ("gpus", "gpus_per_node", "sites") and value > MAX_GPUS:
            raise UserError(f"{context}: {name} must be at most {MAX_GPUS:,}, not {value!r}")
        if fields[name].type == "int" and value != int(value):
            raise UserError(f"{context}: {name} must be a whole number, not {value!r}")
    integers = {name: int(value) for name, value in content.items() if fields[name].type == "int"}
    return kind(**{**content, **integers})


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
