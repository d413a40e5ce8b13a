"""First kernel launches: which kernels a rank has launched, and when receives may therefore be pending.

CUDA loads a kernel's code at its first launch, and loading can wait for anything that runs on the device. NCCL's
receives run there from posting until their message comes, its sends until they are received. A rank that posts a
receive ahead of its use and then launches a kernel for the first time waits for a peer that may be waiting for the
result of that kernel: a deadlock. So:

    **While a receive is pending, nothing is launched that this rank has not launched before.**

A step has launch signatures, which determine the kernels that its operations launch. If this rank has completed steps
with all of them before (``CompletedLaunches``), it posts receives ahead of their use, so that they overlap with
computing. In any other step, before each operation the rank posts the receives of the messages that are due
(``Timetable``: those sent by operations of a lower level) and waits on the host until all have arrived; then it
launches. At a step's end the host waits for the last receives. CPUs load nothing, so there every signature counts as
completed.

**Ranks need not agree** about the signatures, and no rank is told another's: in either case messages are posted in the
order in which they are sent, and a rank that posts ahead also posts the due receives.

**There is no deadlock**, whatever is loaded when. Let every launch of an unknown kernel wait until nothing of its rank
is left on the device, and look at the lowest level at which any rank stands. (1) All messages that are due at this
level were sent by operations of lower levels, which are done; so no receive waits in vain. (2) A send that is still on
a device was issued at a lower level. Its receiver stands at this level or a higher level, so the message is due there
and its receive is posted; the send completes. (3) A collective of a tensor-parallel or data-parallel group is issued
by the same operation of the same schedule on all its ranks, and all ranks issue their collectives in the same order.
Those of lower levels were issued everywhere; at this level, the earliest collective that a rank waits for is the next
that the others issue. So a rank proceeds, and the lowest level rises. Everything after the pipeline is of a higher
level than the whole pipeline.

So sends may be pending during a first launch: their receivers need nothing more from this rank. If receives were
posted only where they are needed, this would fail: with virtual stages, a rank can have a message in transit that its
receiver needs after another message that this rank has not computed yet.

Each direction of travel, and each way around the ring of virtual stages or along the V, has a separate process group;
torch gives each pair of ranks in a process group a separate communicator and stream. So no message is queued behind a
message of another direction, and none takes a kernel's place: a process has a hardware queue for each of its streams
(``distributed.process_group.open_queues``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable

MAX_SIGNATURES = 4096
"""Number of signatures remembered. A forgotten signature costs overlap in a step, and nothing else."""


class CompletedLaunches:
    """Launch signatures of the steps that this rank has completed.

    Each stands for a set of launches (of the model, of an end of a boundary, of a group's compressors), which it
    determines completely. None stands for unpredictable launches, and is never covered.
    """

    def __init__(self) -> None:
        self._signatures: OrderedDict[Hashable, None] = OrderedDict()

    def covers(self, signatures: Collection[Hashable]) -> bool:
        """Whether all kernels that a step will launch were launched before."""
        return all(signature is not None and signature in self._signatures for signature in signatures)

    def record(self, signatures: Collection[Hashable]) -> None:
        """Add the signatures of a step that has completed."""
        for signature in signatures:
            if signature is not None:
                self._signatures[signature] = None
                self._signatures.move_to_end(signature)
        while len(self._signatures) > MAX_SIGNATURES:
            self._signatures.popitem(last=False)
