"""State transfer to an island that joins the others again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.base.errors import first_line
from megatron.base.stateful import Scope, StatefulParts
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.diloco.membership import Islands
from megatron.diloco.outer_sync import OuterSync
from megatron.diloco.store import POLL_SECONDS
from megatron.distributed.agreement import any_rank, gather_texts
from megatron.distributed.errors import CommunicationError
from megatron.distributed.group import Group
from megatron.kernels.dtypes import dtype_from_name, name_of_dtype
from megatron.optimizer.inner import state_names

MAX_JOIN_ATTEMPTS = 4
"""Number of attempts to join before the island gives up."""
_MAX_STATE_COPIES, _MAX_EXTRA_ELEMENTS = 8, 1 << 20
"""Limit on the elements of received compressor states: a multiple of the model's parameters, plus a constant."""


@dataclass(eq=False)
class Joining:
    """Transfer of an island's state to an island that joins.

    The state is the outer parameters with their momentum (before there are any, the weights), the inner optimizer's
    state, the compressors' states without residuals, and the position of the run. Every rank sends to the same rank of
    the other island.

    Args:
        stages: this rank's chunks of the model.
        sync: transfers and outer steps of this rank.
        islands: the other islands.
        stateful_parts: checkpoint state other than tensors.
        tell: prints a line, on the rank that logs.
    """

    stages: Sequence[nn.Module]
    sync: OuterSync
    islands: Islands
    stateful_parts: StatefulParts
    tell: Callable[[str], None]

    def admit_islands_at_start(self) -> None:
        """Send the state, before the first step, to islands that started without it."""
        islands = self.islands
        awaited, deadline = set(islands.behind), time.monotonic() + islands.seconds
        while awaited and islands.admits_islands and not any_rank(islands.control, time.monotonic() > deadline):
            awaited -= self.admit_islands()
            time.sleep(POLL_SECONDS)

    def admit_islands(self) -> set[int]:
        """Send this island's state to islands that join after a round, if this island is the one that admits them.
        Return the islands that have joined, the same on all ranks."""
        joined = set()
        for island, ticket in self.islands.admit_islands():
            problem = ""
            try:
                group = self.islands.make_pair_group(ticket, self.islands.island, island)
                store, rank = self.islands.store, self.islands.rank
                if rank == 0:
                    store.put(f"stream/{ticket}/parts", self.stateful_parts.state_dict())
                states = [
                    {name: x for name, x in state.export_tensors().items() if name != RESIDUAL}
                    for state in self.sync.states()
                ]
                forms = [
                    {name: [list(x.shape), name_of_dtype(x.dtype)] for name, x in state_tensors.items()}
                    for state_tensors in states
                ]
                store.put(f"stream/{ticket}/forms/{rank}", [forms, [state.counters for state in self.sync.states()]])
                self._broadcast(
                    group, [*self._tensors(), *(x for state_tensors in states for x in state_tensors.values())]
                )
            except CommunicationError as error:
                problem = str(error)
                self.tell(f"warning: island {island} could not join: {error}")
            if not any_rank(self.islands.control, bool(problem)):
                joined.add(island)
                self.tell(f"island {island} has joined")
        return joined

    def join(self) -> bool:
        """Wait for a round that admits this island, and copy another island's state.

        Returns:
            False when no island is left.

        Raises:
            CommunicationError: on every rank, when it fails repeatedly.
        """
        for failures in range(1, MAX_JOIN_ATTEMPTS + 1):
            answer = self.islands.request_to_join()
            if answer is None:
                return False
            ticket, reply = answer
            problem = ""
            try:
                self._receive(self.islands.make_pair_group(ticket, reply.source, self.islands.island), ticket)
            except CommunicationError as error:
                problem = str(error)
            if any_rank(self.islands.control, bool(problem)):
                problem = next(text for text in gather_texts(self.islands.control, problem) if text)
                self.tell(f"warning: joining has failed {failures} of {MAX_JOIN_ATTEMPTS} times: {problem}")
                continue
            iteration = self.stateful_parts.state_dict()["progress"]["iteration"]
            self.tell(f"joined the other islands at iteration {iteration}, with the state of island {reply.source}")
            return True
        raise CommunicationError(
            f"joining the other islands has failed {MAX_JOIN_ATTEMPTS} times; the last time: {problem}"
        )

    def _tensors(self) -> Iterator[Tensor]:
        if not self.sync.outer.has_outer_params:  # islands take steps together, and there are no outer parameters yet
            yield from self.sync.outer.mains
        for tensors in self.sync.outer.tensors().values():
            yield from tensors
        optimizer = self.sync.optimizer
        for shard in optimizer.shards:
            for kind in state_names(optimizer.config, shard):
                yield optimizer.inner.state[shard.main][kind]
        for stage in self.stages:
            yield from stage.buffers()

    def _receive(self, group: Group, ticket: int) -> None:
        common = self._wait_for(f"stream/{ticket}/parts")
        forms, counters = self._wait_for(f"stream/{ticket}/forms/{self.islands.rank}")
        try:
            if common["outer"]["begun"]:
                self.sync.outer.copy_params()
            device = self.sync.topology.device
            sizes = [math.prod(shape) for form in forms for shape, _ in form.values()]
            # No compressor needs more memory than this.
            most = (
                _MAX_STATE_COPIES * sum(main.numel() for main in self.sync.outer.mains) * self.sync.topology.layout.dp
            )
            if any(size < 0 for size in sizes) or sum(sizes) > most + _MAX_EXTRA_ELEMENTS:
                raise ValueError(f"it has {sum(sizes):,} numbers of compressors")
            states = [
                {
                    name: torch.empty(shape, dtype=dtype_from_name(dtype), device=device)
                    for name, (shape, dtype) in form.items()
                }
                for form in forms
            ]
            self._broadcast(group, [*self._tensors(), *(x for state_tensors in states for x in state_tensors.values())])
            finite = all(bool(torch.isfinite(x).all()) for x in self._tensors() if x.is_floating_point())
            if not finite:
                raise ValueError("some of it is not finite")
            for state, tensors, counts in zip(self.sync.states(), states, counters, strict=True):
                state.tensors, state.counters = tensors, {str(name): int(count) for name, count in counts.items()}
            self.stateful_parts.load_state_dict(common, (Scope.OPTIMIZER, Scope.SCHEDULE, Scope.POSITION))
        except CommunicationError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise CommunicationError(
                f"the state that an island has sent cannot be used: {first_line(error)}"
            ) from error
        if self.sync.outer.has_outer_params:
            with torch.no_grad():
                for index in range(len(self.sync.outer.mains)):
                    self.sync.outer.update_params(index, 0.0)
        self.sync.publish_params()

    def _broadcast(self, group: Group, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            self.sync.ledger.complete(Point.OUTER, group.broadcast(x, 0))

    def _wait_for(self, key: str) -> Any:
        deadline = time.monotonic() + self.islands.seconds

        def check() -> None:
            if time.monotonic() > deadline:
                raise CommunicationError(f"island has sent nothing within {self.islands.seconds:g} s")

        return self.islands.store.wait_for(key, check)
