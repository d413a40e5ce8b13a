"""Interfaces of the stands on which pieces of a model run: dry, or on a real device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.expert.dispatcher import ExpertComm
from megatron.planner.dry_run import Spread, Tally


class Meter(Protocol):
    """A context manager that meters the costs of the code inside it."""

    ledger: Ledger

    def take(self) -> Tally:
        """Return the costs since the last call."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...


class Stand(Protocol):
    """The stand on which pieces run: dry, or on a real device."""

    torch_device: torch.device
    repeats: int

    def recorder(self) -> Any:
        """A new ``Meter``."""

    def group(self, size: int, recorder: Any, nodes: int = 0) -> Group:
        """A group of ``size`` ranks that reduce with this rank, split into ``nodes`` nodes."""

    def experts(self, size: int, recorder: Any, plan: CompressionPlan, spread: Spread, folded: bool) -> ExpertComm:
        """The expert-parallel points of this rank's group; ``spread`` replaces routing in dry runs.

        Args:
            folded: see ``ExpertComm``.
        """

    @property
    def attention(self) -> Callable[..., Tensor]:
        """The attention function, for ``ForwardContext``."""

    def fill(self, x: Tensor) -> Tensor:
        """Fill a tensor in place, if it can have contents."""
