"""Process groups that count the bytes of their collectives.

Every collective returns a ``Pending`` with the number of bytes that this rank sends. A single-rank group sends nothing
and needs no process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.errors import CommunicationError, reason
from megatron.distributed.work import Caller, CallWork, JointWork, Work

# torch 2.13 renamed these two functions, and warns about the old names.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

NOTHING = "nothing"
"""Name of the operation in a single-rank group."""

_STEPWISE_BYTES = 1 << 16
"""Minimum bytes of a partner-by-partner exchange over gloo, which takes 2/3 of the time of gloo's own at 100 Mb/s."""
_PAIR_SUM_BYTES = 1 << 20
"""Maximum bytes of a two-rank all-reduce by exchange over gloo, which has fewer round trips than a ring."""
_DIRECT_SUM_RANKS = 8
"""Maximum number of ranks that send a few numbers to all others at once."""
_PARTNERS_TAG, _DIRECT_TAG = 1 << 20, 1 << 21
"""Tags of exchanges with one partner after another, and with all at once; distinct from those of pipeline messages."""

_COMBINE_FUNCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}
"""Elementwise reduction of two tensors, by operation."""


@dataclass
class Pending:
    """A pending collective or message.

    Args:
        work: torch's handle; None if there is nothing to wait for.
        sent_bytes: bytes that this rank sends.
        description: operation and group, for error messages.
        finish: local computation that completes the operation, called by ``wait``.
        started: ``time.perf_counter()`` at the start.
        records_event: record a CUDA event for ``synchronize``.
    """

    work: Work | None
    sent_bytes: int
    description: str
    finish: Callable[[], object] | None = None
    started: float = field(default_factory=time.perf_counter)
    records_event: bool = False
    _event: torch.cuda.Event | None = None

    @property
    def operation(self) -> str:
        """Name of the operation: all-reduce, send, ..."""
        return self.description.split(" ", 1)[0]

    def wait(self) -> None:
        """Wait for the result. On CUDA, only kernels that are launched afterwards may use it.

        Raises:
            CommunicationError: when a peer has failed or timed out.
        """
        if self.work is not None:
            with self._name_errors():
                self.work.wait()
            self.work = None
            if self.records_event:
                self._event = torch.cuda.Event()
                self._event.record()
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()

    @property
    def waited(self) -> bool:
        """Whether ``wait`` has been called, or there was nothing to wait for."""
        return self.work is None

    def synchronize(self) -> None:
        """Block the host until the device has completed the operation, after ``wait``.

        Raises:
            CommunicationError: when a peer has failed or timed out.
        """
        if self._event is not None:
            event, self._event = self._event, None
            with self._name_errors():
                event.synchronize()

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Re-raise errors as ``CommunicationError`` with the operation and its ranks."""
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(f"{self.description} failed: {reason(error)}") from error

    def done(self) -> bool:
        """Whether ``wait`` would not block."""
        return self.work is None or self.work.is_completed()


@dataclass(frozen=True)
class NodeSplit:
    """Ranks of a group by node, with this rank's subgroups.

    Args:
        nodes: group ranks by node, with an equal number on each node; the same in all groups of a kind.
        node: the ranks on this rank's node.
        across: the ranks with this rank's position on each node.
        reason: explanation, for the log, when the group does not consist of several complete nodes; else empty.
    """

    nodes: tuple[tuple[int, ...], ...]
    node: Group
    across: Group
    reason: str = ""


class Group:
    """A process group.

    Args:
        pg: torch's process group; None for a single rank.
        ranks: global ranks in group order.
        rank: this process's position in ``ranks``.
        name: name in error messages.
        backend: "gloo", "nccl" or "none".

    ``split`` holds its ranks by node, if requested; see ``split_by_node``.
    """

    def __init__(
        self, pg: dist.ProcessGroup | None, ranks: tuple[int, ...], rank: int, name: str, backend: str
    ) -> None:
        self.pg = pg
        self.ranks = ranks
        self.rank = rank
        self.name = name
        self.backend = backend
        self.split: NodeSplit | None = None
        self._spare: list[Tensor] = []
        self._exchanges: Caller | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def start(self, operation: str, sent: int, call: Callable[[], Work | None]) -> Pending:
        """Start an operation. All operations use this method, so that a subclass can override the transfer.

        Args:
            operation: name of the operation.
            sent: bytes that this rank sends.
            call: starts the operation in torch.

        Raises:
            CommunicationError: when the operation cannot be started.
        """
        label = f"{operation} over {self.name} (ranks {', '.join(map(str, self.ranks))})"
        try:
            return Pending(call(), sent, label)
        except RuntimeError as error:
            raise CommunicationError(f"{label} failed: {reason(error)}") from error

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """All-reduce ``x``, contiguous, in place. A ring sends 2 (n-1)/n times the bytes of ``x``.

        Over gloo, the ranks of a two-rank group exchange small tensors and combine them locally. This sends the same
        number of bytes with fewer round trips. Callers must wait for each such operation, and for each all-gather.
        """
        if self.size == 1:
            return Pending(None, 0, NOTHING)
        combine = _COMBINE_FUNCTIONS.get(op)
        if combine is not None and self.backend == "gloo" and self.size == 2 and x.nbytes < _PAIR_SUM_BYTES:
            return self._combine_directly(x, combine)
        sent = 2 * (self.size - 1) * x.nbytes // self.size
        return self.start("all-reduce", sent, lambda: dist.all_reduce(x, op=op, group=self.pg, async_op=True))

    def all_reduce_numbers(self, x: Tensor) -> Pending:
        """Sum a few numbers, in place, while the links may be busy.

        A ring over gloo has 2 (n-1) messages one after another, and each waits for the data that is queued at its link.
        Up to 8 ranks send their numbers to all others at once instead.
        """
        if self.backend == "gloo" and 1 < self.size <= _DIRECT_SUM_RANKS:
            return self._combine_directly(x, torch.add)
        return self.all_reduce(x)

    def _combine_directly(self, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Pending:
        """Send ``x`` to all other ranks, and combine the ranks' tensors in place."""
        rows = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        sent = (self.size - 1) * x.nbytes
        pending = self.start("all-reduce", sent, lambda: self._exchange_with_all(x, rows))
        # In rank order, because sums, and the result for 0 and -0 or for two NaNs, depend on the order.
        pending.finish = lambda: x.copy_(reduce(combine, rows))
        return pending

    def _exchange_with_all(self, x: Tensor, rows: Sequence[Tensor]) -> Work:
        """Send ``x`` to all other ranks and receive ``rows[i]`` from rank i, all at once."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        works = [dist.irecv(rows[rank], group=self.pg, tag=_DIRECT_TAG, group_src=rank) for rank in others]
        works += [dist.isend(x, group=self.pg, tag=_DIRECT_TAG, group_dst=rank) for rank in others]
        return JointWork([work for work in works if work is not None])

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """All-gather the ranks' ``x`` along dimension 0 into ``out``; both contiguous. Sends (n-1) times ``x``.

        Over gloo, two-rank and large all-gathers exchange partner by partner, with the same result.
        """
        if self.size == 1:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            return Pending(None, 0, NOTHING)
        sent = (self.size - 1) * x.nbytes
        if self._uses_partner_exchange(sent):
            rows = out.view(self.size, *x.shape)
            rows[self.rank].copy_(x)
            return self.start("all-gather", sent, lambda: self._exchange_with_partners([x] * self.size, list(rows)))
        return self.start("all-gather", sent, lambda: _ALL_GATHER(out, x, group=self.pg, async_op=True))

    def _uses_partner_exchange(self, sent: int) -> bool:
        """Whether to exchange with a single partner at a time; the same on all ranks."""
        return self.backend == "gloo" and sent >= (1 if self.size == 2 else _STEPWISE_BYTES)

    def _exchange_with_partners(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Work:
        """Send ``out[i]`` to rank i and receive ``into[i]`` from it, for every other rank i.

        With a single partner, send and receive are posted immediately: a receive posted before its message arrives
        saves a round trip, and a round trip must wait for all data that is queued at the link. With several, a thread
        exchanges with one at a time. gloo's own all-to-all sends to all partners at once, and before the receives are
        posted: flows then compete for every link, which costs a third of a slow link's rate, and two ranks send one
        after the other instead of at once.
        """

        def start_exchange(step: int) -> JointWork:
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            receive_work = dist.irecv(into[source], group=self.pg, tag=_PARTNERS_TAG, group_src=source)
            send_work = dist.isend(out[to], group=self.pg, tag=_PARTNERS_TAG, group_dst=to)
            assert receive_work is not None
            assert send_work is not None
            return JointWork((receive_work, send_work))

        if self.size == 2:
            return start_exchange(1)

        def steps() -> None:
            for step in range(1, self.size):
                start_exchange(step).wait()

        if self._exchanges is None:
            self._exchanges = Caller("exchange")
        return CallWork(self._exchanges.start(steps))

    def _exchange(self, out: Tensor, x: Tensor, operation: str, sent: int) -> Pending:
        """Send row i of ``x`` to rank i and receive row i of ``out`` from it."""
        if not self._uses_partner_exchange(sent):
            return self.start(operation, sent, lambda: dist.all_to_all_single(out, x, group=self.pg, async_op=True))
        to, source = x.chunk(self.size), out.chunk(self.size)
        source[self.rank].copy_(to[self.rank])
        return self.start(operation, sent, lambda: self._exchange_with_partners(to, source))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """Reduce-scatter ``x`` along dimension 0: ``out`` on rank r is the sum of the ranks' r-th chunks.

        gloo's reduce-scatter sends the bytes of an all-reduce. It is replaced by an all-to-all and a local sum, which
        send (n-1)/n times the bytes of ``x``. ``out`` may alias this rank's chunk of ``x``.
        """
        if self.size == 1:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            return Pending(None, 0, NOTHING)
        sent = (self.size - 1) * x.nbytes // self.size
        if self.backend != "gloo":
            return self.start(
                "reduce-scatter",
                sent,
                lambda: _REDUCE_SCATTER(out, x, group=self.pg, async_op=True),
            )
        # Memory of an earlier call if possible: new memory costs a page fault per page.
        fitting = (i for i, spare in enumerate(self._spare) if spare.shape == x.shape and spare.dtype == x.dtype)
        index = next(fitting, None)
        received_rows = torch.empty_like(x) if index is None else self._spare.pop(index)
        pending = self._exchange(received_rows, x, "reduce-scatter", sent)

        def finish() -> None:
            rows = received_rows.view(self.size, *out.shape)
            if out.dtype in (torch.bfloat16, torch.float16):
                out.copy_(rows.sum(dim=0, dtype=torch.float32))
            else:
                torch.sum(rows, dim=0, out=out)
            self._spare.append(received_rows)

        pending.finish = finish
        return pending

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """All-to-all: send row i of ``x`` (n rows, contiguous) to rank i, and receive row i of ``out`` from it."""
        if self.size == 1:
            out.copy_(x)
            return Pending(None, 0, NOTHING)
        sent = (self.size - 1) * x.nbytes // self.size
        return self._exchange(out, x, "all-to-all", sent)

    def all_to_all_uneven(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> Pending:
        """All-to-all with uneven sizes: send ``x[i]`` to rank i, and receive ``out[i]`` from it, for i != rank.

        Args:
            out, x: a flat, contiguous tensor per rank; sender and receiver use equal sizes, and all ranks one dtype.
        """
        if self.size == 1:
            return Pending(None, 0, NOTHING)
        sent = sum(tensor.nbytes for rank, tensor in enumerate(x) if rank != self.rank)
        if self.backend == "gloo":
            return self.start("all-to-all", sent, lambda: self._exchange_with_partners(x, out))
        empty = x[0].new_empty(0)
        inputs, outputs = ([empty if r == self.rank else row for r, row in enumerate(rows)] for rows in (x, out))
        return self.start("all-to-all", sent, lambda: dist.all_to_all(outputs, inputs, group=self.pg, async_op=True))

    def broadcast(self, x: Tensor, src: int = 0) -> Pending:
        """Broadcast ``x`` from group rank ``src``, in place."""
        if self.size == 1:
            return Pending(None, 0, NOTHING)
        sent = x.nbytes if self.rank == src else 0
        return self.start("broadcast", sent, lambda: dist.broadcast(x, group=self.pg, async_op=True, group_src=src))

    def collect(self, out: Tensor, x: Tensor) -> Pending:
        """Gather the ranks' ``x`` as the rows of ``out`` on the first rank; other ranks ignore ``out``."""
        if self.size == 1:
            out[0].copy_(x)
            return Pending(None, 0, NOTHING)
        first = self.rank == 0
        rows = list(out.unbind()) if first else None
        sent = 0 if first else x.nbytes
        return self.start("gather", sent, lambda: dist.gather(x, rows, group=self.pg, async_op=True, group_dst=0))

    def distribute(self, x: Tensor) -> Pending:
        """Copy ``x`` from the first rank to all ranks, in place. The first rank sends it n - 1 times."""
        if self.size == 1:
            return Pending(None, 0, NOTHING)
        first = self.rank == 0
        rows = [x] * self.size if first else None
        sent = (self.size - 1) * x.nbytes if first else 0
        return self.start("scatter", sent, lambda: dist.scatter(x, rows, group=self.pg, async_op=True, group_src=0))

    def send(self, x: Tensor, dst: int, tag: int = 0) -> Pending:
        """Send ``x`` to group rank ``dst``. ``x`` must live until the send is done."""
        return self.start(
            f"send to rank {self.ranks[dst]}",
            x.nbytes,
            lambda: dist.isend(x, group=self.pg, tag=tag, group_dst=dst),
        )

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Pending:
        """Receive into ``x`` from group rank ``src``."""
        pending = self.start(
            f"receive from rank {self.ranks[src]}",
            0,
            lambda: dist.irecv(x, group=self.pg, tag=tag, group_src=src),
        )
        pending.records_event = self.backend == "nccl"
        return pending

    def barrier(self) -> None:
        """Wait until every rank of the group has called ``barrier``."""
        if self.size == 1:
            return
        device = "cuda" if self.backend == "nccl" else "cpu"
        self.all_reduce(torch.zeros(1, device=device)).wait()
