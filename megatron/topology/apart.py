"""Process groups apart from torch's world, over ranks of several worlds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.topology.errors import CommunicationError, reason
from megatron.topology.group import Group


def group_apart(store: dist.Store, members: Sequence[int], own: int, name: str, seconds: float) -> Group:
    """Makes a group that torch's world knows nothing of; a failure in it leaves the world as it is.

    Args:
        store: where the members meet, and nobody else.
        members: their numbers, which messages name.
        own: this one's number.
        name: name of the group.
        seconds: longest time of making it, and of everything in it.

    Raises:
        CommunicationError: when a member does not come.
    """
    ranks = tuple(members)
    rank = ranks.index(own)
    if len(ranks) == 1:
        return Group(None, ranks, rank, name, "none")
    timeout = timedelta(seconds=seconds)
    store.set_timeout(timeout)
    made: Any = dist.ProcessGroup(store, rank, len(ranks))
    try:
        backend = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
    except RuntimeError as error:
        raise CommunicationError(f"{name} ({', '.join(map(str, ranks))}) do not meet: {reason(error)}") from error
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return Group(made, ranks, rank, name, "gloo")
