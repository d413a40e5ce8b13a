"""Rounds of islands on a rank: pseudo-gradients, transfers, and steps of the outer parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.compression.outer import OuterOptions
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.diloco.fragments import Fragment, ShardRange, bucket_memory, fragment_index
from megatron.diloco.outer_optimizer import OuterOptimizer
from megatron.distributed.group import Group
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
        fragment: index of the fragment.
        sent: number of completed iterations when it was sent.
        attempt: 0-based index of the attempt.
        members: islands of the round.
        own_loss, mean_loss: training loss since the last round, of this island and averaged over the members.
        norm: L2 norm of this island's pseudo-gradient.
        failed: whether the exchange failed on this rank.
        arrived: whether the mean has arrived and is not applied yet.
        excluded_island: island excluded from the attempt, to test whether it spoils the mean; None for no island.
        mean_norm: L2 norm of the received mean.
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
    excluded_island: int | None = None
    mean_norm: float = 0.0

    @property
    def key(self) -> str:
        """Name of the round and attempt, the same on all islands."""
        return f"{self.sent}/{self.fragment}/{self.attempt}"


class OuterSync:
    """Transfers and outer steps of this rank. All ranks of an island make the same calls.

    The first replica of an island exchanges parameters with the first replicas of the other islands: it first collects
    the shares of its replicas, and then broadcasts the mean to them. So each element is exchanged between islands once,
    and compressors receive complete parameters.

    Args:
        buffers: all parameters of this rank.
        optimizer: the inner optimizer.
        topology: this rank's groups in the island.
        plan: plan with the compressor of ``OUTER``.
        ledger: ledger that counts the bytes.
        options: options of the point.
        layers: number of layers of the model.
        untrained_tensors: tensors without gradients (expert biases), by name. Islands average them exactly, without
            momentum.

    ``in_flight`` is the fragment in transit. ``last_round_iteration`` is the number of completed iterations at the last
    round, ``last_sync_iteration`` that at which all islands last had the values of the outer parameters. ``norms`` are
    the norms of the fragments' last means, 0 before the first mean.
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
        untrained_tensors: Mapping[str, Tensor],
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
        self._untrained_tensors: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for name, x in untrained_tensors.items():
            self._untrained_tensors[fragment_index(name, layers, count)][name] = x
        self._means: dict[str, Tensor] = {}

    def states(self) -> Iterator[CompressorState]:
        """Compressor states of all fragments."""
        for fragment in self.fragments:
            yield from fragment.reducer.states()

    @torch.no_grad()
    def collect_pseudo_gradient(self, number: int) -> float:
        """Compute the pseudo-gradient of a fragment, from the shares of all replicas; return its L2 norm over the whole
        island."""
        fragment = self.fragments[number]
        self.allocate_buffers(number)
        for name, x in self._untrained_tensors[number].items():
            self._means[name].copy_(x)
        with self.ledger.encoding(Point.OUTER):
            for shard_range in fragment.shard_ranges:
                out = fragment.shard_view(shard_range)
                outer_param = self.outer.outer_params[shard_range.index].to(out.device)
                torch.sub(outer_param, self.outer.mains[shard_range.index], out=out)
        self._gather_replica_shares(fragment)
        return self._norm(number, fragment.shard_view)

    def _gather_replica_shares(self, fragment: Fragment) -> None:
        """Collect a fragment from the shares of the replicas."""
        if not self.optimizer.sharded:
            return
        for bucket in fragment.buckets:
            # Each element is nonzero on at most one replica, so the sum is exact.
            self.ledger.complete(Point.PARAM_GATHER, bucket.buffer.group.all_reduce(bucket.reduced.flat))

    @torch.no_grad()
    def sum_gradients(self, group: Group, iteration: int, scale: float) -> None:
        """Sum the gradients of a synchronous step over all islands, through the point's compressor.

        Args:
            group: this rank and the same rank of all other islands.
            iteration: 0-based.
            scale: loss scale of the gradients.

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

    def allocate_buffers(self, number: int) -> None:
        """Allocate memory for the pseudo-gradient of a fragment."""
        for bucket in self.fragments[number].buckets:
            bucket.reduced.flat = bucket_memory(bucket.buffer, bucket.length)
        self._means = {
            name: torch.zeros_like(x, dtype=torch.float64) for name, x in self._untrained_tensors[number].items()
        }

    def free_buffers(self, number: int) -> None:
        """Free the memory for the pseudo-gradient of a fragment."""
        for bucket in self.fragments[number].buckets:
            bucket.reduced.flat = bucket_memory(bucket.buffer, 0)

    def outer_param_norm(self, number: int) -> float:
        """L2 norm of a fragment's outer parameters, over the whole island."""
        return self._norm(number, lambda shard_range: self.outer.outer_params[shard_range.index])

    def _norm(self, number: int, tensor_of: Callable[[ShardRange], Tensor]) -> float:
        shard_ranges, tp = self.fragments[number].shard_ranges, self.topology.tp.rank
        tensors = [tensor_of(shard_range) for shard_range in shard_ranges if shard_range.shard.counts_in_norm(tp)]
        return math.sqrt(self._sum_over_island(sum_of_squares(tensors)))

    def mean_norm(self, number: int, contributors: int, exchanged: bool) -> float:
        """L2 norm of the mean from ``finish_transfer``, over the whole island, before ``accept_mean``.

        Tensors that are replicated over tensor-parallel ranks count once for each rank.

        Args:
            number: index of the fragment.
            contributors: number of islands that sent a contribution.
            exchanged: whether the exchange completed on this rank; if not, the rank adds 0.
        """
        total = 0.0
        if exchanged:
            total = self.fragments[number].reducer.squared_norm()
            if not all(bool(torch.isfinite(mean).all()) for mean in self._means.values()):
                total = math.nan
        return math.sqrt(self._sum_over_island(total)) / contributors

    def _sum_over_island(self, value: float) -> float:
        """Sum over all ranks of the island; nan if the sum is negative or nan."""
        total = torch.tensor([value], dtype=torch.float64, device=self.topology.device)
        self.ledger.complete(Point.CONTROL, self.topology.world.all_reduce(total))
        return float(total) if float(total) >= 0 else math.nan

    def start_transfer(self, number: int, group: Group, iteration: int) -> None:
        """Start the exchange of a fragment with other islands.

        Raises:
            CommunicationError: when an island is gone.
        """
        reducer = self.fragments[number].reducer
        reducer.begin_round(group, iteration)
        reducer.exchange(wait=False)

    def finish_transfer(self, number: int) -> None:
        """Complete the exchange, without a change of compressor states.

        Raises:
            CommunicationError: when an island is gone.
        """
        reducer = self.fragments[number].reducer
        reducer.exchange()
        for mean in self._means.values():
            self.ledger.complete(Point.OUTER, reducer.group.all_reduce(mean))

    @torch.no_grad()
    def accept_mean(self, number: int, contributors: int) -> None:
        """Commit an exchange: update the compressor states, and write the mean to the buckets of all replicas."""
        fragment = self.fragments[number]
        fragment.reducer.write_results()
        for mean in self._means.values():
            mean.div_(contributors)
        for bucket in fragment.buckets:
            flat = bucket.reduced.flat
            if bucket.is_owner:
                if bucket.leads:
                    flat.div_(contributors)
                self.ledger.complete(Point.PARAM_GATHER, bucket.buffer.group.broadcast(flat))
            if bucket.tie is not None:
                self.ledger.complete(Point.PARAM_GATHER, self.topology.embedding[bucket.tie].broadcast(flat))

    @torch.no_grad()
    def apply_mean(self, number: int, alpha: float) -> None:
        """Take the outer step of a fragment with the mean from ``accept_mean``."""
        fragment = self.fragments[number]
        for shard_range in fragment.shard_ranges:
            self.outer.step(shard_range.index, fragment.shard_view(shard_range))
            self.outer.update_params(shard_range.index, alpha)
        for name, x in self._untrained_tensors[number].items():
            x.copy_(self._means[name])
        self.free_buffers(number)

    def publish_params(self) -> None:
        """Copy the values that a round has changed into the model."""
        self.optimizer.publisher.publish_exactly()

    def means(self) -> dict[int, Tensor]:
        """Shards of a mean that has arrived and is not applied yet, by shard index; empty without such a mean."""
        if self.in_flight is None or not self.in_flight.arrived:
            return {}
        fragment = self.fragments[self.in_flight.fragment]
        return {shard_range.index: fragment.shard_view(shard_range) for shard_range in fragment.shard_ranges}

    def untrained_means(self) -> dict[str, Tensor]:
        """Means of untrained tensors that are not applied yet, by name; empty without such a mean."""
        return self._means if self.in_flight is not None and self.in_flight.arrived else {}

    def state_dict(self) -> dict[str, Any]:
        """State other than tensors. A transfer that has not arrived is left out, and is sent again after a restart."""
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
        """Restore the state, after all tensors are restored."""
        self.last_round_iteration, self.last_sync_iteration = int(state.get("round", 0)), int(state.get("together", 0))
        norms = [float(norm) for norm in state.get("norms", ())]
        if len(norms) == len(self.norms):
            self.norms = norms
        in_flight = state.get("flight")
        if in_flight is not None:
            self.in_flight = InFlightFragment(**{**in_flight, "members": tuple(in_flight["members"])})
