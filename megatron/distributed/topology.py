"""The mesh as seen by a rank: coordinates, device and groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.distributed.agreement import gather_texts
from megatron.distributed.group import Group
from megatron.distributed.layout import Coordinates, Layout, Tie
from megatron.distributed.nodes import MakeGroups, split_by_node
from megatron.distributed.pipeline_group import PipelineGroup


@dataclass(frozen=True)
class Topology:
    """Mesh, device and groups of this rank.

    Args:
        layout: the sizes of the mesh.
        rank: this process's global rank.
        device: this rank's device.
        mesh: torch's DeviceMesh with dimensions pp, dp, tp; None in a single process.
        world: all ranks.
        control: all ranks over gloo on the CPU, for decisions and checkpoints.
        tp, dp, pp: this rank's group in each dimension.
        forward_link, backward_link: point-to-point groups for activations, and for their gradients.
        ep: ranks that share the experts: data-parallel ranks, and with folding their tensor-parallel ranks, too.
        expert_dp: ranks with equal experts; ``dp`` without expert parallelism.
        embedding: for each tied embedding on this stage, the stages of this pipeline with a copy.
        fused_embedding: the same stages in all pipelines, on this tensor-parallel coordinate.
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
        """Whether this rank logs."""
        return self.rank == self.layout.world_size - 1


def single_process(device: torch.device | str = "cpu") -> Topology:
    """Topology of a single process without process groups."""

    def make_group(name: str) -> Group:
        return Group(None, (0,), 0, name, "none")

    replicas = make_group("data-parallel")
    return Topology(
        layout=Layout(),
        rank=0,
        device=torch.device(device),
        mesh=None,
        world=make_group("world"),
        control=make_group("control"),
        tp=make_group("tensor-parallel"),
        dp=replicas,
        ep=make_group("expert-parallel"),
        expert_dp=replicas,
        pp=make_group("pipeline"),
        forward_link=make_group("pipeline-forward"),
        backward_link=make_group("pipeline-backward"),
    )


NODE_SPLITS = frozenset({"dp", "ep", "embedding", "fused_embedding"})
"""Fields of ``Topology`` with groups that can be split by node."""


def build_topology(
    layout: Layout, device: torch.device, node: str = "", by_node: Collection[str] = frozenset()
) -> Topology:
    """Build the mesh and its groups; torch's default process group must exist.

    Activations and gradients in the pipeline use separate groups: on NCCL a pair of ranks runs its messages in issue
    order, so an activation that waits for its receiver would block a gradient in the other direction. All groups have
    the default group's timeout.

    Args:
        layout: the sizes of the mesh.
        device: this rank's device.
        node: this rank's node (``LaunchEnvironment.node``).
        by_node: names of the groups to split by node, from ``NODE_SPLITS``.

    Raises:
        ValueError: when the layout has a different number of ranks than the world.
    """
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the world has {dist.get_world_size()}")
    rank = dist.get_rank()
    backend = "nccl" if device.type == "cuda" else "gloo"
    assert dist.group.WORLD is not None
    # Without a timeout, ``new_group`` would take torch's default.
    timeout: timedelta = dist.group.WORLD._get_backend(device).options._timeout
    shape, dims = (layout.pp, layout.dp, layout.tp), ("pp", "dp", "tp")
    overrides: Any = {dim: (backend, _backend_options(device, timeout)) for dim in dims}
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=dims, backend_override=overrides)

    def along(dim: str, ranks_of_groups: Iterable[tuple[int, ...]], name: str) -> Group:
        ranks = next(r for r in ranks_of_groups if rank in r)
        return Group(mesh.get_group(dim), ranks, ranks.index(rank), name, backend)

    def make(groups: Iterable[tuple[int, ...]], name: str, backend: str = backend) -> Group | None:
        """Make all groups of a kind; return this rank's. All ranks must make the same calls in the same order."""
        local_group = None
        for ranks in groups:
            pg = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            if rank in ranks:
                local_group = Group(pg, ranks, ranks.index(rank), name, backend)
        return local_group

    everyone = tuple(range(layout.world_size))
    world = Group(dist.group.WORLD, everyone, rank, "world", backend)
    control = make([everyone], "control", "gloo")
    assert control is not None
    pipeline = along("pp", layout.pp_groups(), "pipeline")
    replicas = along("dp", layout.dp_groups(), "data-parallel")
    experts: Group | None = Group(None, (rank,), 0, "expert-parallel", "none")
    expert_replicas: Group | None = replicas
    if layout.ep > 1:
        experts = make(layout.ep_groups(), "expert-parallel")
        expert_replicas = make(layout.expert_dp_groups(), "expert replicas")
    assert experts is not None
    assert expert_replicas is not None
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
        embedding={tie: group for tie in layout.ties if (group := make(layout.embedding_groups(tie), tie.value))},
        fused_embedding={
            tie: group
            for tie in layout.ties
            if (group := make(layout.fused_embedding_groups(tie), f"{tie.value} replicas"))
        },
        forward_link=_make_link(pipeline, layout, device, make, "pipeline-forward"),
        backward_link=_make_link(pipeline, layout, device, make, "pipeline-backward"),
    )
    if by_node:
        node_of = gather_texts(control.pg, node)
        groups: list[tuple[str, Group | None, Iterable[tuple[int, ...]]]] = [("dp", topology.dp, layout.dp_groups())]
        if layout.ep > 1:
            groups.append(("dp", topology.expert_dp, layout.expert_dp_groups()))
            groups.append(("ep", topology.ep, layout.ep_groups()))
        for tie in layout.ties:
            groups.append(("embedding", topology.embedding.get(tie), layout.embedding_groups(tie)))
            groups.append(("fused_embedding", topology.fused_embedding.get(tie), layout.fused_embedding_groups(tie)))
        for kind, group, ranks_of_groups in groups:
            if kind in by_node:
                split_by_node(group, list(ranks_of_groups), node_of, make)
    return topology


def _make_link(pipeline: Group, layout: Layout, device: torch.device, make: MakeGroups, name: str) -> Group:
    """Make the group for pipeline messages in a direction; with a single stage, reuse the pipeline group."""
    if layout.pp == 1:
        return pipeline
    upwards = make(layout.pp_groups(), name)
    downwards = make(layout.pp_groups(), name) if layout.chunks > 1 else None
    assert upwards is not None
    link = PipelineGroup(upwards, downwards) if downwards else upwards

    # NCCL connects two ranks at their first message, which blocks both. In a step, a rank posts receives before its
    # peer can send, so connecting there could deadlock. So neighbors exchange an element now, pair by pair.
    x = torch.zeros(1, device=device)
    is_ring = layout.chunks > 1 and not layout.v_shaped
    for first in range(link.size if is_ring else link.size - 1):
        second = (first + 1) % link.size
        for src, dst in ((first, second), (second, first)):
            if link.rank == src:
                link.send(x, dst).wait()
            elif link.rank == dst:
                pending = link.recv(x, src)
                pending.wait()
                pending.synchronize()
    return link


def _backend_options(device: torch.device, timeout: timedelta) -> Any:
    """Options of a process group on the device's backend, with a timeout; a mesh has no other way to set it."""
    gloo: Any = dist.ProcessGroupGloo
    options: Any = dist.ProcessGroupNCCL.Options() if device.type == "cuda" else gloo._Options()
    options._timeout = timeout
    return options
