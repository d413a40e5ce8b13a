"""The group of a pipeline's ranks for its messages."""

from __future__ import annotations

from torch import Tensor

from megatron.distributed.group import Group, Pending


class PipelineGroup(Group):
    """Group for pipeline messages with two process groups, for messages to higher and to lower ranks.

    In an NCCL process group, a pair of ranks runs its messages strictly in issue order. With two stages and virtual
    stages, the same pair exchanges messages in both directions, and a receive posted early would block a message that
    the peer needs before it can reply.

    Args:
        upwards, downwards: groups of the same ranks with different process groups.
    """

    def __init__(self, upwards: Group, downwards: Group) -> None:
        super().__init__(upwards.pg, upwards.ranks, upwards.rank, upwards.name, upwards.backend)
        self.downwards = downwards

    def send(self, x: Tensor, dst: int, tag: int = 0) -> Pending:
        return super().send(x, dst, tag) if dst > self.rank else self.downwards.send(x, dst, tag)

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Pending:
        return super().recv(x, src, tag) if src < self.rank else self.downwards.recv(x, src, tag)
