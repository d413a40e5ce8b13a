"""The rule of first launches: which kernels a rank has launched, and when receives may therefore be pending.

CUDA loads a kernel's code at its first launch, and the loading can wait for whatever runs on the device. NCCL's
receives run there from the moment they are posted until their message comes, its sends until they are received. A rank
that posts a receive ahead of its use and then launches a kernel for the first time waits for a peer that may be waiting
for what this rank was about to compute: both wait for ever. So:

    **While a receive is pending, nothing is launched that this rank has not launched before.**

A step has a kind: everything that decides which kernels its operations launch. In a step whose kind this rank has
completed before (``CompletedKinds``), receives are posted ahead of their use, so that they overlap with computing. In
any other step, before each operation the rank posts the receives of the messages that are due (``Timetable``: those
that operations of a lower level send) and waits on the host until all of them are here; then it launches. At a step's
end the host waits for the last receives. CPUs have nothing to load, so there every kind counts as completed.

**Ranks need not agree** about the kind, and none is told another's: in either case messages are posted in the order in
which they are sent, and a rank that posts ahead posts what is due, too.

**Nobody waits for ever**, whatever is loaded when. Let every launch of an unknown kernel wait until nothing of its rank
is left on the device, and look at the lowest level at which any rank stands. (1) All messages that are due at this
level were sent by operations of lower levels, which are done; so no receive is waited for in vain. (2) A send that is
still on a device was issued at a lower level. Its receiver stands at this level or a higher one, so the message is due
there and its receive is posted; the send completes. (3) A collective of a tensor-parallel or data-parallel group is
issued by the same operation of the same schedule on all its ranks, and all issue theirs in the same order. Those of
lower levels were issued everywhere; of those of this level, the earliest that a rank waits for is the next that the
others issue. So a rank goes on, and the lowest level rises. What comes after the pipeline is of a higher level than all
of it.

So sends may be pending while something is launched for the first time: their receivers need nothing more of this rank
to receive them. With receives posted only where they are needed that would not be so: with virtual stages, a rank can
have a message on its way that its receiver needs after one that this rank has not computed yet.

Each direction of travel has a process group of its own, and each way around the ring of virtual stages; torch gives
each pair of ranks in a process group a communicator and a stream of its own. So no message is queued behind one of
another direction, and it takes no kernel's place: a process has a hardware queue for each of its streams
(``topology.launch.open_queues``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable

MOST_KINDS = 4096
"""Parts that are remembered. One that is forgotten costs overlap in one step, and nothing else."""


class CompletedKinds:
    """Kinds of the steps that this rank has completed, as sets of parts.

    Each part stands for launches of its own (of the model, of one end of a boundary, of a group's compressors), which
    it decides completely. None stands for launches of which nothing can be said, and is never known.
    """

    def __init__(self) -> None:
        self._parts: OrderedDict[Hashable, None] = OrderedDict()

    def know(self, parts: Collection[Hashable]) -> bool:
        """Whether all kernels that a step will launch were launched before."""
        return all(part is not None and part in self._parts for part in parts)

    def add(self, parts: Collection[Hashable]) -> None:
        """Adds the parts of a step that has completed."""
        for part in parts:
            if part is not None:
                self._parts[part] = None
                self._parts.move_to_end(part)
        while len(self._parts) > MOST_KINDS:
            self._parts.popitem(last=False)
