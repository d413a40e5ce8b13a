"""Gradient buckets -> sums over the data-parallel group, overlapped with backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.comm.rounds import Job, RoundsInFlight
from megatron.compression.api import RoundCompressor
from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, num_bytes


@dataclass(frozen=True)
class Place:
    """Where a parameter's gradient lies in its bucket.

    Args:
        name: logical name of the parameter.
        start: index of its first element.
        shape: of the parameter on this rank.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """Its part of the bucket, in its shape."""
        count = 1
        for size in self.shape:
            count *= size
        return flat[self.start : self.start + count].view(self.shape)


@dataclass
class GradBucket:
    """Gradients that are reduced together.

    Args:
        flat: the gradients, contiguous.
        places: the parameters in it.
        skipped: something else reduces it (the fused embedding).
    """

    flat: Tensor
    places: tuple[Place, ...] = ()
    skipped: bool = False


@dataclass
class Unit:
    """Equally shaped parameters of one bucket that are compressed in one stack, or a whole bucket.

    Args:
        places: the parameters; empty for a whole bucket.
        state: what the compressor remembers of them.
    """

    places: tuple[Place, ...] = ()
    state: CompressorState = field(default_factory=CompressorState)

    def collect(self, flat: Tensor, scale: float) -> Tensor:
        """The unit's gradients without the loss scale, in fp32 or fp64: (k, *shape), or the whole bucket."""
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        if not self.places:
            return torch.mul(flat, 1.0 / scale).to(wide)
        shape = (len(self.places), *self.places[0].shape)
        stack = self.state.take_spare(shape, wide)
        if stack is None:
            stack = torch.empty(shape, dtype=wide, device=flat.device)
        for own, place in zip(stack, self.places, strict=True):
            torch.mul(place.view(flat), 1.0 / scale, out=own) if flat.dtype == wide else own.copy_(
                place.view(flat)
            ).mul_(1.0 / scale)
        return stack

    def scatter(self, flat: Tensor, total: Tensor, scale: float) -> None:
        """Writes the sums, with the loss scale, where the gradients came from."""
        if not self.places:
            torch.mul(total, scale, out=flat) if flat.dtype == total.dtype else flat.copy_(total.mul_(scale))
            return
        for own, place in zip(total, self.places, strict=True):
            place.view(flat).copy_(own if scale == 1.0 else own.mul_(scale))


class GradReducer:
    """Sums buckets over a group, each as soon as it and all before it are ready.

    Buckets are launched in the order of the list, whatever the order in which they become ready, so that every
    rank issues its collectives in the same order by construction.

    Args:
        buckets: with ``sharded`` each length divides by the group's size.
        group: the data-parallel ranks.
        plan: the compressor of ``DP_GRAD``, shared by all buckets, and when it is on.
        ledger: where the bytes are counted.
        sharded: each rank needs only its own share of each sum.
    """

    def __init__(
        self, buckets: Sequence[GradBucket], group: Group, plan: CompressionPlan, ledger: Ledger, sharded: bool
    ) -> None:
        self.buckets = buckets
        self.group = group
        self.plan = plan
        self.ledger = ledger
        self.sharded = sharded
        self.units = [self._units(bucket) for bucket in buckets]
        self._on = False
        self._scale = 1.0
        self._ready = [False] * len(buckets)
        self._in_flight: list[tuple[RoundsInFlight | None, list[Unit], Tensor | None]] = []

    @property
    def compressor(self) -> RoundCompressor:
        """The algorithm, with this iteration's options."""
        return self.plan.rounds(Point.DP_GRAD)

    def _units(self, bucket: GradBucket) -> list[Unit]:
        """What the compressor is given of a bucket; parameters in no unit are summed exactly."""
        if not self.plan.covers(Point.DP_GRAD, self.plan.stage) or bucket.skipped:
            return []
        if not self.compressor.stacks:
            return [Unit()]
        shapes: dict[tuple[int, ...], list[Place]] = {}
        for place in bucket.places:
            if self.plan.ever_pays(Point.DP_GRAD, place.shape):
                shapes.setdefault(place.shape, []).append(place)
        return [Unit(tuple(places)) for places in shapes.values()]

    def begin(self, iteration: int, scale: float) -> None:
        """A step begins.

        Args:
            iteration: 0-based.
            scale: the loss scale that its gradients carry.
        """
        self._on = self.plan.activation(Point.DP_GRAD).on(iteration)
        self._scale = scale

    def residuals(self) -> Iterator[tuple[list[str], CompressorState]]:
        """What each unit's residual belongs to (a stack's parameters, or a whole bucket's), and its state."""
        for bucket, units in zip(self.buckets, self.units, strict=True):
            for unit in units:
                names = [place.name for place in unit.places]
                whole = [place.name for place in bucket.places]
                yield names or [whole[0] if len(whole) == 1 else f"{whole[0]} ... {whole[-1]}"], unit.state

    @property
    def wants_update(self) -> bool:
        """Whether the compressor asks for the optimizer's update of this step."""
        states = (unit.state for units in self.units for unit in units)
        return self._on and self.compressor.observes and any(state.count("awaiting") for state in states)

    @property
    def freezes_variance(self) -> bool:
        """Whether this step's sums carry noise that the optimizer's second moments must not see."""
        return self._on and self.compressor.freezes_variance

    def observe(self) -> None:
        """Hands the compressor the optimizer's update, which lies in the buckets in place of the gradients."""
        for bucket, units in zip(self.buckets, self.units, strict=True):
            for unit in units:
                self.compressor.observe(unit.collect(bucket.flat, 1.0), unit.state)

    def mark_ready(self, index: int) -> None:
        """Bucket ``index`` holds its final local gradient; launches every bucket whose turn has come."""
        self._ready[index] = True
        while len(self._in_flight) < len(self.buckets) and self._ready[len(self._in_flight)]:
            self._in_flight.append(self._launch(len(self._in_flight)))

    def _launch(self, index: int) -> tuple[RoundsInFlight | None, list[Unit], Tensor | None]:
        bucket = self.buckets[index]
        compressor = self.compressor
        units = [u for u in self.units[index] if not u.places or compressor.pays(u.places[0].shape)] if self._on else []
        exact = None
        if bucket.skipped:
            return None, [], None
        if not units:
            jobs = [Job(IdentityRounds(), bucket.flat, CompressorState())]
        else:
            with self.ledger.encoding(Point.DP_GRAD):
                jobs = [Job(compressor, unit.collect(bucket.flat, self._scale), unit.state) for unit in units]
                rest = self._rest(bucket, units)
                if rest:
                    exact = torch.cat([place.view(bucket.flat).reshape(-1) for place in rest])
                    jobs.append(Job(IdentityRounds(), exact, CompressorState()))
        steps = 1 if self.sharded else 2
        raw = steps * (self.group.size - 1) * num_bytes(bucket.flat) // self.group.size
        in_flight = RoundsInFlight(
            jobs, self.group, self.ledger, Point.DP_GRAD, self.sharded and not units, raw_bytes=raw
        )
        return in_flight, units, exact

    def _rest(self, bucket: GradBucket, units: Sequence[Unit]) -> list[Place]:
        """The parameters that are summed exactly beside compressed ones."""
        if any(not unit.places for unit in units):
            return []
        compressed = {place.start for unit in units for place in unit.places}
        return [place for place in bucket.places if place.start not in compressed]

    def finish(self) -> None:
        """Launches what was not launched yet, waits for all, and leaves the sums in the buckets."""
        for index in range(len(self.buckets)):
            self.mark_ready(index)
        for bucket, (rounds, units, exact) in zip(self.buckets, self._in_flight, strict=True):
            if rounds is None:
                continue
            totals = [aggregate.total for aggregate in rounds.wait()]
            if not units:
                if totals[0].data_ptr() != bucket.flat.data_ptr():
                    bucket.flat.copy_(totals[0])
                continue
            with self.ledger.encoding(Point.DP_GRAD):
                for unit, total in zip(units, totals, strict=False):
                    unit.scatter(bucket.flat, total, self._scale)
                if exact is not None:
                    self._scatter_rest(bucket, units, totals[-1])
        self._ready = [False] * len(self.buckets)
        self._in_flight = []

    def _scatter_rest(self, bucket: GradBucket, units: Sequence[Unit], total: Tensor) -> None:
        position = 0
        for place in self._rest(bucket, units):
            view = place.view(bucket.flat)
            view.copy_(total[position : position + view.numel()].view(place.shape))
            position += view.numel()
