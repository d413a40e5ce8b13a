"""Rounds of islands on one rank: from the pseudo-gradients of its shards to a step of the outer parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.outer import OuterOptions
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.diloco.fragments import Fragment, bucket_memory, fragment_of
from megatron.diloco.outer_optimizer import OuterOptimizer
from megatron.distributed.group import Group, Pending
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.kernels.ops import sum_of_squares
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.buffer import FlatBuffer


@dataclass
class InFlightFragment:
    """A fragment in transit.

    Args:
        fragment: number of the fragment.
        sent: iterations of the run after which it was sent.
        attempt: number of the attempt, from 0.
        members: the islands that take part.
        own_loss, mean_loss: training loss of this island since the last round, and the members' mean.
        norm: L2 norm of this island's pseudo-gradient.
        failed: the exchange failed on this rank.
        arrived: the mean has arrived, and waits to be applied.
        without: an island that the attempt leaves out, to see whether it spoils the mean; None for none.
        mean_norm: L2 norm of the mean that was received.
    """

    fragment: int
    sent: int
    attempt: int
    members: tuple[int, ...]
    own_loss: float
    mean_loss: float
    norm: float
    failed: bool = False
    arrived: bool = False
    without: int | None = None
    mean_norm: float = 0.0

    @property
    def key(self) -> str:
        """Name of the round and attempt, the same on all islands."""
        return f"{self.sent}/{self.fragment}/{self.attempt}"


class OuterSync:
    """This rank's part in rounds. Every rank of an island has an instance; all call its methods alike.

    Among replicas that hold the same parameters, the first exchanges them with the first replicas of other islands: the
    replicas' shares are assembled before, and the mean is broadcast to all of them after. So every number crosses
    between islands once, and compressors see whole parameters.

    Args:
        buffers: all parameters of this rank.
        optimizer: the inner optimizer.
        topology: the ranks of this island.
        plan, ledger: the compressor of ``OUTER``, and where bytes are counted.
        options: the point's options.
        layers: layers of the model.
        untrained_tensors: tensors of the model that no gradient moves, by name: the biases of experts. Islands average
            them exactly, without momentum.

    ``in_flight`` is the fragment in transit, ``last_round_iteration`` the number of iterations after which the last
    round was, ``last_sync_iteration`` that after which all islands last had the outer parameters' values, and ``norms``
    are the norms of the fragments' last means, 0 before the first.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        optimizer: Optimizer,
        topology: Topology,
        plan: CompressionPlan,
        ledger: Ledger,
        options: OuterOptions,
        layers: int,
        untrained_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.optimizer, self.topology, self.plan, self.ledger = optimizer, topology, plan, ledger
        self.options = options
        self.outer = OuterOptimizer([shard.main for shard in optimizer.shards], options)
        ties = dict(topology.embedding)
        count = options.fragments
        self.norms = [0.0] * count
        self.in_flight: InFlightFragment | None = None
        self.last_round_iteration = self.last_sync_iteration = 0
        self.fragments = [
            Fragment(number, count, layers, buffers, optimizer.shards, ties, plan, ledger) for number in range(count)
        ]
        self._others: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for name, x in (untrained_tensors or {}).items():
            self._others[fragment_of(name, layers, count)][name] = x
        self._means: dict[str, Tensor] = {}

    def states(self) -> Iterator[CompressorState]:
        """States of the compressors."""
        for fragment in self.fragments:
            yield from fragment.reducer.states()

    @torch.no_grad()
    def collect_pseudo_gradient(self, number: int) -> None:
        """Assembles the difference of a fragment from the shares of all replicas."""
        fragment = self.fragments[number]
        self.allocate_buffers(number)
        for name, x in self._others[number].items():
            self._means[name].copy_(x)
        with self.ledger.encoding(Point.OUTER):
            for shard_range in fragment.shard_ranges:
                self.outer.write_pseudo_gradient(shard_range.index, fragment.shard_view(shard_range))
        self._gather_replica_shares(fragment)

    def _gather_replica_shares(self, fragment: Fragment) -> None:
        """Assembles a fragment from the replicas' shares."""
        if not self.optimizer.sharded:
            return
        for bucket in fragment.buckets:
            # Each number is nonzero on a single replica: the sum is exact.
            self._wait(bucket.buffer.group.all_reduce(bucket.reduced.flat))

    @torch.no_grad()
    def sum_gradients(self, group: Group, iteration: int, scale: float) -> None:
        """Sums the gradients of a joint step of all islands, by the point's compressor.

        Args:
            group: this rank on all islands.
            iteration: 0-based.
            scale: the loss scale that the gradients carry.

        Raises:
            CommunicationError: when an island is gone.
        """
        for number, fragment in enumerate(self.fragments):
            self.allocate_buffers(number)
            for shard_range in fragment.shard_ranges:
                fragment.shard_view(shard_range).copy_(shard_range.shard.grad)
            self._gather_replica_shares(fragment)
            fragment.reducer.begin_round(group, iteration, scale, early=True)
            fragment.reducer.exchange()
            self.accept_mean(number, 1)
            for shard_range in fragment.shard_ranges:
                shard_range.shard.grad.copy_(fragment.shard_view(shard_range))
            self.free_buffers(number)

    def copy_outer_params(self) -> None:
        """Begins local steps: copies the outer parameters, and drops the residuals of gradients."""
        self.outer.copy_params()
        for state in self.states():
            state.tensors.pop(RESIDUAL, None)

    def allocate_buffers(self, number: int) -> None:
        """Allocates a fragment's memory for pseudo-gradients."""
        for bucket in self.fragments[number].buckets:
            bucket.reduced.flat = bucket_memory(bucket.buffer, bucket.length)
        self._means = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in self._others[number].items()}

    def free_buffers(self, number: int) -> None:
        """Frees a fragment's memory."""
        for bucket in self.fragments[number].buckets:
            bucket.reduced.flat = bucket_memory(bucket.buffer, 0)

    def pseudo_gradient_norm(self, number: int) -> float:
        """L2 norm of the difference of a fragment, over the whole island."""
        fragment, tp = self.fragments[number], self.topology.tp.rank
        counted_tensors = [
            fragment.shard_view(shard_range)
            for shard_range in fragment.shard_ranges
            if shard_range.shard.counts_in_norm(tp)
        ]
        return math.sqrt(self._summed(sum_of_squares(counted_tensors)))

    def outer_param_norm(self, number: int) -> float:
        """L2 norm of the outer parameters of a fragment, over the whole island."""
        fragment, tp = self.fragments[number], self.topology.tp.rank
        counted_tensors = [
            self.outer.outer_params[shard_range.index]
            for shard_range in fragment.shard_ranges
            if shard_range.shard.counts_in_norm(tp)
        ]
        return math.sqrt(self._summed(sum_of_squares(counted_tensors)))

    def mean_norm(self, number: int, contributors: int, exchanged: bool) -> float:
        """L2 norm of the mean received by ``finish_transfer``, over the whole island; nothing has changed yet.

        Tensors replicated over tensor-parallel ranks are counted by each of them.

        Args:
            number: the fragment.
            contributors: number of islands that sent something.
            exchanged: the exchange completed on this rank; else the rank adds nothing.
        """
        total = 0.0
        if exchanged:
            total = self.fragments[number].reducer.squared_norm()
            if not all(bool(torch.isfinite(mean).all()) for mean in self._means.values()):
                total = math.nan
        return math.sqrt(self._summed(total)) / contributors

    def _summed(self, value: float) -> float:
        """Sum of a number over the ranks of the island; nan if it is negative or nan."""
        total = torch.tensor([value], dtype=torch.float64, device=self.topology.device)
        pending = self.topology.world.all_reduce(total)
        self.ledger.count_message(Point.CONTROL, pending.sent_bytes)
        self.ledger.wait_for(Point.CONTROL, pending)
        return float(total) if float(total) >= 0 else math.nan

    def start_transfer(self, number: int, group: Group, iteration: int) -> None:
        """Starts the exchange of a fragment with other islands.

        Raises:
            CommunicationError: when an island is gone.
        """
        reducer = self.fragments[number].reducer
        reducer.begin_round(group, iteration)
        reducer.exchange(wait=False)

    def advance_transfer(self, number: int) -> None:
        """Advances the exchange as far as possible without waiting.

        Raises:
            CommunicationError: when an island is gone.
        """
        self.fragments[number].reducer.exchange(wait=False)

    def finish_transfer(self, number: int) -> None:
        """Completes the exchange; compressors' states do not change.

        Raises:
            CommunicationError: when an island is gone.
        """
        reducer = self.fragments[number].reducer
        reducer.exchange()
        for mean in self._means.values():
            pending = reducer.group.all_reduce(mean)
            self.ledger.count_message(Point.OUTER, pending.sent_bytes)
            self.ledger.wait_for(Point.OUTER, pending)

    def discard_transfer(self, number: int) -> None:
        """Discards an exchange that does not count."""
        self.fragments[number].reducer.discard()

    @torch.no_grad()
    def accept_mean(self, number: int, contributors: int) -> None:
        """Commits an exchange: updates compressors' states, and replaces the difference by the mean on all replicas."""
        fragment = self.fragments[number]
        fragment.reducer.write_results()
        for mean in self._means.values():
            mean.div_(contributors)
        for bucket in fragment.buckets:
            flat = bucket.reduced.flat
            if bucket.is_owner:
                if bucket.leads:
                    flat.div_(contributors)
                self._wait(bucket.buffer.group.broadcast(flat))
            if bucket.tie is not None:
                self._wait(self.topology.embedding[bucket.tie].broadcast(flat))

    @torch.no_grad()
    def apply_mean(self, number: int, alpha: float) -> None:
        """Takes the outer step of a fragment, with the mean that ``accept_mean`` left."""
        fragment = self.fragments[number]
        for shard_range in fragment.shard_ranges:
            self.outer.step(shard_range.index, fragment.shard_view(shard_range))
            self.outer.update_params(shard_range.index, alpha)
        for name, x in self._others[number].items():
            x.copy_(self._means[name])
        self.free_buffers(number)

    def publish_params(self) -> None:
        """Copies the values changed by rounds into the model."""
        self.optimizer.publisher.publish_exactly()

    def load_outer_params(self) -> None:
        """Sets all values to the outer parameters'."""
        with torch.no_grad():
            for index in range(len(self.outer.mains)):
                self.outer.update_params(index, 0.0)
        self.publish_params()

    def _wait(self, pending: Pending) -> None:
        """Waits for a collective inside the island."""
        self.ledger.count_message(Point.PARAM_GATHER, pending.sent_bytes)
        self.ledger.wait_for(Point.PARAM_GATHER, pending)

    def means(self) -> dict[int, Tensor]:
        """Ranges of an arrived mean that is not applied yet, by shard number; empty otherwise."""
        if self.in_flight is None or not self.in_flight.arrived:
            return {}
        fragment = self.fragments[self.in_flight.fragment]
        return {shard_range.index: fragment.shard_view(shard_range) for shard_range in fragment.shard_ranges}

    def means_of_others(self) -> dict[str, Tensor]:
        """The same for tensors that are not parameters, by name."""
        return self._means if self.in_flight is not None and self.in_flight.arrived else {}

    def state_dict(self) -> dict[str, Any]:
        """State besides tensors for a checkpoint. A transfer that has not arrived is left out: it is sent again."""
        in_flight = self.in_flight if self.in_flight is not None and self.in_flight.arrived else None
        return {
            "begun": self.outer.has_outer_params,
            "round": self.last_round_iteration,
            "together": self.last_sync_iteration,
            "fragments": self.options.fragments,
            "norms": list(self.norms),
            "flight": None if in_flight is None else asdict(in_flight),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state, after the tensors."""
        self.last_round_iteration, self.last_sync_iteration = int(state.get("round", 0)), int(state.get("together", 0))
        norms = [float(norm) for norm in state.get("norms", ())]
        if len(norms) == len(self.norms):
            self.norms = norms
        in_flight = state.get("flight")
        if in_flight is not None:
            self.in_flight = InFlightFragment(**{**in_flight, "members": tuple(in_flight["members"])})
