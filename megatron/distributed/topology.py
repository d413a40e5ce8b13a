"""A rank's view of the mesh: its coordinates, its device and its groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.distributed.agreement import gather_texts
from megatron.distributed.group import Group, PipelineGroup
from megatron.distributed.layout import Coordinates, Layout, Tie
from megatron.distributed.nodes import split_by_node


@dataclass(frozen=True)
class Topology:
    """The mesh as every engine sees it.

    Args:
        layout: the sizes of the mesh.
        rank: this process's global rank.
        device: device of its tensors.
        mesh: torch's DeviceMesh with dimensions pp, dp, tp; None on a single process.
        world: all ranks.
        control: all ranks over gloo on the CPU, for small decisions and checkpoints.
        tp, dp, pp: this rank's groups along each dimension.
        forward_link, backward_link: point-to-point groups of activations and of their gradients.
        ep: the ranks that share this rank's experts: replicas, or all ranks of some replicas.
        expert_dp: the ranks that hold equal experts; ``dp`` where every replica holds all of them.
        embedding: the stages of this rank's pipeline that hold a tied embedding, if several do, this stage included.
        fused_embedding: the same stages of all pipelines, on this rank's tensor-parallel coordinate.
    """

    layout: Layout
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    world: Group
    control: Group
    tp: Group
    dp: Group
    pp: Group
    forward_link: Group
    backward_link: Group
    ep: Group
    expert_dp: Group
    embedding: Mapping[Tie, Group] = field(default_factory=dict)
    fused_embedding: Mapping[Tie, Group] = field(default_factory=dict)

    @property
    def coordinates(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank logs: it is on the last stage, where the loss is."""
        return self.rank == self.layout.world_size - 1


def single_process(device: torch.device | str = "cpu") -> Topology:
    """The topology of a single process without a process group."""

    def alone(name: str) -> Group:
        return Group(None, (0,), 0, name, "none")

    replicas = alone("data-parallel")
    return Topology(
        layout=Layout(),
        rank=0,
        device=torch.device(device),
        mesh=None,
        world=alone("world"),
        control=alone("control"),
        tp=alone("tensor-parallel"),
        dp=replicas,
        ep=alone("expert-parallel"),
        expert_dp=replicas,
        pp=alone("pipeline"),
        forward_link=alone("pipeline-forward"),
        backward_link=alone("pipeline-backward"),
    )


NODE_SPLITS = frozenset({"dp", "ep", "embedding", "fused_embedding"})
"""Groups that can be cut by node, by their names in ``Topology``."""


def build_topology(
    layout: Layout, device: torch.device, node: str = "", by_node: Collection[str] = frozenset()
) -> Topology:
    """Builds the mesh and its groups; torch's default process group must exist.

    Pipeline messages of each direction have a separate group: on NCCL a pair of ranks runs its messages in the order
    issued, so an activation waiting for its receiver must not hold up a gradient that goes the other way. All groups
    have the default group's timeout.

    Args:
        layout: the sizes of the mesh.
        device: this rank's device.
        node: this rank's node (``LaunchEnvironment.node``).
        by_node: names from ``NODE_SPLITS`` of the groups to cut by node.

    Raises:
        ValueError: when the layout does not cover the world.
    """
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the world has {dist.get_world_size()}")
    rank = dist.get_rank()
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", _default_timeout(device)
    shape, dims = (layout.pp, layout.dp, layout.tp), ("pp", "dp", "tp")
    overrides: Any = {dim: (backend, _options(device, timeout)) for dim in dims}
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=dims, backend_override=overrides)

    def along(dim: str, ranks_of_groups: Iterable[tuple[int, ...]], name: str) -> Group:
        ranks = next(r for r in ranks_of_groups if rank in r)
        return Group(mesh.get_group(dim), ranks, ranks.index(rank), name, backend)

    everyone = tuple(range(layout.world_size))
    world = Group(dist.group.WORLD, everyone, rank, "world", backend)
    make = _GroupMaker(rank, backend, timeout)
    control = make([everyone], "control", "gloo")
    assert control is not None
    pipeline = along("pp", layout.pp_groups(), "pipeline")
    replicas = along("dp", layout.dp_groups(), "data-parallel")
    experts, expert_replicas = _expert_groups(layout, replicas, make)
    topology = Topology(
        layout=layout,
        rank=rank,
        device=device,
        mesh=mesh,
        world=world,
        control=control,
        tp=along("tp", layout.tp_groups(), "tensor-parallel"),
        dp=replicas,
        ep=experts,
        expert_dp=expert_replicas,
        pp=pipeline,
        embedding=_of_ties({tie: make(layout.embedding_groups(tie), tie.value) for tie in layout.ties}),
        fused_embedding=_of_ties(
            {tie: make(layout.fused_embedding_groups(tie), f"{tie.value} replicas") for tie in layout.ties}
        ),
        forward_link=_link(pipeline, layout, device, make, "pipeline-forward"),
        backward_link=_link(pipeline, layout, device, make, "pipeline-backward"),
    )
    if by_node:
        _cut_by_node(topology, by_node, node, make)
    return topology


@dataclass(frozen=True)
class _GroupMaker:
    """Makes groups beside the mesh's; every rank of the world calls it alike."""

    rank: int
    backend: str
    timeout: timedelta

    def __call__(self, groups: Iterable[tuple[int, ...]], name: str, backend: str = "") -> Group | None:
        """Makes all groups of a kind, in order; returns this rank's group, or None if it is in none."""
        own_group = None
        for ranks in groups:
            pg = dist.new_group(list(ranks), backend=backend or self.backend, timeout=self.timeout)
            if self.rank in ranks:
                own_group = Group(pg, ranks, ranks.index(self.rank), name, backend or self.backend)
        return own_group


def _of_ties(groups: Mapping[Tie, Group | None]) -> dict[Tie, Group]:
    """The groups that this rank is in."""
    return {tie: group for tie, group in groups.items() if group is not None}


def _expert_groups(layout: Layout, replicas: Group, make: _GroupMaker) -> tuple[Group, Group]:
    """The replicas that share this rank's experts, and those that hold equal experts."""
    if layout.ep == 1:
        rank = replicas.ranks[replicas.rank]
        return Group(None, (rank,), 0, "expert-parallel", "none"), replicas
    expert_group, replica_group = (
        make(layout.ep_groups(), "expert-parallel"),
        make(layout.expert_dp_groups(), "expert replicas"),
    )
    assert expert_group is not None
    assert replica_group is not None
    return expert_group, replica_group


def _link(pipeline: Group, layout: Layout, device: torch.device, make: _GroupMaker, name: str) -> Group:
    """The group of pipeline messages in one direction; the pipeline's group if there is a single stage."""
    if layout.pp == 1:
        return pipeline
    upwards = make(layout.pp_groups(), name)
    downwards = make(layout.pp_groups(), name) if layout.chunks > 1 else None
    assert upwards is not None
    link = PipelineGroup(upwards, downwards) if downwards else upwards
    _open(link, device, ring=layout.chunks > 1)
    return link


def _cut_by_node(topology: Topology, kinds: Collection[str], node: str, make: _GroupMaker) -> None:
    """Splits by node the groups of the given kinds (of ``NODE_SPLITS``)."""
    layout, node_of = topology.layout, gather_texts(topology.control.pg, node)
    groups: list[tuple[str, Group | None, Iterable[tuple[int, ...]]]] = [("dp", topology.dp, layout.dp_groups())]
    if layout.ep > 1:
        groups.append(("dp", topology.expert_dp, layout.expert_dp_groups()))
        groups.append(("ep", topology.ep, layout.ep_groups()))
    for tie in layout.ties:
        groups.append(("embedding", topology.embedding.get(tie), layout.embedding_groups(tie)))
        groups.append(("fused_embedding", topology.fused_embedding.get(tie), layout.fused_embedding_groups(tie)))
    for kind, group, ranks_of_groups in groups:
        if kind in kinds:
            split_by_node(group, list(ranks_of_groups), node_of, make)


def _default_timeout(device: torch.device) -> timedelta:
    """The timeout of torch's default process group; ``new_group`` would take torch's default."""
    assert dist.group.WORLD is not None
    timeout: timedelta = dist.group.WORLD._get_backend(device).options._timeout
    return timeout


def _options(device: torch.device, timeout: timedelta) -> Any:
    """Options of a process group of the device's backend; the mesh has no other way to set a timeout."""
    gloo: Any = dist.ProcessGroupGloo
    options: Any = dist.ProcessGroupNCCL.Options() if device.type == "cuda" else gloo._Options()
    options._timeout = timeout
    return options


def _open(link: Group, device: torch.device, ring: bool) -> None:
    """Sends an element each way between neighboring stages, pair after pair.

    NCCL connects two ranks at their first message, and blocks both until then. During a step a rank posts receives
    before its peer can send, so that wait could be a deadlock.

    Args:
        link: group of the pipeline's ranks.
        device: device of the messages.
        ring: whether the last stage also sends to the first.
    """
    x = torch.zeros(1, device=device)
    for first in range(link.size if ring else link.size - 1):
        second = (first + 1) % link.size
        for src, dst in ((first, second), (second, first)):
            if link.rank == src:
                link.send(x, dst).wait()
            elif link.rank == dst:
                pending = link.recv(x, src)
                pending.wait()
                pending.synchronize()
