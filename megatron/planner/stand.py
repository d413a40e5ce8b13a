"""Where pieces of a model run: dry, or on a real device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.comm.experts import ExpertComm
from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.planner.dry_run import Spread, Tally
from megatron.topology.group import Group


class Meter(Protocol):
    """A meter of the costs of the code inside it."""

    ledger: Ledger

    def take(self) -> Tally:
        """Returns the costs since the last call."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...


class Stand(Protocol):
    """The stand on which pieces run: dry, or on a real device."""

    torch_device: torch.device
    repeats: int

    def recorder(self) -> Any:
        """A new ``Meter``."""

    def group(self, size: int, recorder: Any, nodes: int = 0) -> Group:
        """A group of ranks that reduce with this one, cut into so many nodes."""

    def experts(self, size: int, recorder: Any, plan: CompressionPlan, spread: Spread, folded: bool) -> ExpertComm:
        """The points of ranks that share experts with this one; ``spread`` where tokens choose nothing.

        Args:
            folded: see ``ExpertComm``.
        """

    @property
    def attention(self) -> Callable[..., Tensor]:
        """The attention function, for ``ForwardContext``."""

    def fill(self, x: Tensor) -> Tensor:
        """Fills a tensor in place, if it can have contents."""
