"""Process groups outside torch's world, over ranks of several worlds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.distributed.errors import CommunicationError, reason
from megatron.distributed.group import Group
from megatron.distributed.host_staging import StagedGroup
from megatron.distributed.work import Caller

CPU = torch.device("cpu")


def make_island_group(
    store: dist.Store,
    members: Sequence[int],
    island: int,
    name: str,
    seconds: float,
    address: str | None,
    device: torch.device,
) -> Group:
    """Make a group outside torch's world; a failure in the group leaves the world intact.

    Args:
        store: store of the group's members alone.
        members: numbers of the member islands, which messages name.
        island: number of this island.
        name: name of the group.
        seconds: longest time to make the group, and timeout of its operations.
        address: address of this machine at which the others reach this process; None for gloo's own choice.
        device: device of the tensors; tensors on a GPU are staged through host memory.

    Raises:
        CommunicationError: when a member does not connect.
    """
    ranks = tuple(members)
    rank = ranks.index(island)
    if len(ranks) == 1:
        return Group(None, ranks, rank, name, "none")
    timeout = timedelta(seconds=seconds)
    store.set_timeout(timeout)
    process_group: Any = dist.ProcessGroup(store, rank, len(ranks))

    def make_gloo() -> Any:
        gloo: Any = dist.ProcessGroupGloo
        # By default, gloo listens at the interface GLOO_SOCKET_IFNAME, or at the address of this machine's name, which
        # on many machines other machines cannot reach.
        if address is None:
            return gloo(store, rank, len(ranks), timeout)
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, rank, len(ranks), options)

    try:
        # Both the store and the members may hang; the store has no time limit for that.
        backend = Caller("islands").call(make_gloo, 2 * seconds)
    except (RuntimeError, TimeoutError) as error:
        why = reason(error) or f"not within {2 * seconds:g} s"
        raise CommunicationError(f"{name} ({', '.join(map(str, ranks))}) do not meet: {why}") from error
    process_group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    process_group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    kind = Group if device.type == "cpu" else StagedGroup
    return kind(process_group, ranks, rank, name, "gloo")
