"""State of compressors as logical tensors: saved with the model, and re-sliced or summed on another layout.

Every tensor has leading dimensions that count its holders. A residual belongs to each holder's own contribution to
a sum: with another number of replicas the sum of the residuals is kept, shared out equally. Tables of means of what
each holder has seen become the means over all holders, so that both ends of a message stay equal. Anything else
(factors of a warm start) must find the same holders again, or is dropped with a warning that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.files import Iteration
from megatron.checkpoint.load import load_tensors, saved_shapes
from megatron.checkpoint.logical import LogicalShard, TensorBox, shard_of_local
from megatron.comm.channel import Direction, PipelineChannel
from megatron.comm.reducer import GradReducer, Unit
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.parallel.data.buffer import ParamSlot
from megatron.parallel.data.gradients import GradientSync
from megatron.topology.agree import gather_texts
from megatron.topology.layout import Coordinates, Layout

PREFIX = "compressor."
_COUNTER = "#"
_OF_SAMPLES = (".ids", ".rows")
Log = Callable[[str], None]


@dataclass(frozen=True)
class _Place:
    """A named part of a compressor's state.

    Args:
        name: layout-independent name of its subject: a parameter, or a boundary between layers.
        state: the state that holds it.
        holders: sizes of the leading dimensions: holders whose residuals add up, and tensor-parallel ranks.
        holder: this rank's indices in them.
        index: place in the stack of a unit's tensors; None where a tensor is not a stack.
        span: range of a whole bucket's flat tensors; None where there is none.
        whole: length of the stack, or of the bucket.
        slot: the parameter; None for messages.
        leads: whether it also stands for the unit's counters.
        index_sets: names of tensors that are indices into the unit; replicas share them.
        means: tables of means, and the counts of each.
        cut: tensor-parallel ranks hold means of different things; else equal ones.
    """

    name: str
    state: CompressorState
    holders: tuple[int, int]
    holder: tuple[int, int]
    index: int | None = None
    span: tuple[int, int] | None = None
    whole: int = 0
    slot: ParamSlot | None = None
    leads: bool = True
    index_sets: tuple[str, ...] = ()
    means: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False

    def label(self, kind: str) -> str:
        """Name of a tensor in checkpoints; a sample cache is named by its holder, since each has its own size."""
        holder = ""
        if kind.endswith(_OF_SAMPLES):
            holder = "".join(f".{at}of{size}" for at, size in zip(self.holder, self.holders, strict=True))
        return f"{PREFIX}{self.name}{holder}|{kind}"

    def part(self, kind: str, tensor: Tensor) -> Tensor:
        """This place's part of one of the state's tensors; of a set of indices, a mask (uint8) of the parameter."""
        if kind in self.index_sets and self.slot is not None and self.index is not None:
            count = self.slot.param.numel()
            own = tensor[(tensor >= self.index * count) & (tensor < (self.index + 1) * count)] - self.index * count
            mask = torch.zeros(count, dtype=torch.uint8, device=tensor.device)
            mask[own] = 1
            return mask.view(self.slot.param.shape)
        if self.index is not None:
            return tensor[self.index]
        if self.span is not None and self.slot is not None:
            return tensor[self.span[0] : self.span[1]].view(self.slot.param.shape)
        return tensor

    def shard(self, kind: str, part: Tensor, at: tuple[int, int] | None = None) -> LogicalShard:
        """A part as the box that this rank holds (or reads: that of the holder ``at``) of a logical tensor."""
        at = self.holder if at is None else at
        if kind.endswith(_OF_SAMPLES):
            return LogicalShard(tuple(part.shape), part.dtype, [TensorBox((0,) * part.dim(), part.detach())])
        if kind in self.index_sets and self.slot is not None:
            spec = self.slot.spec
            return shard_of_local(part.unsqueeze(0), (0, *spec.offsets()), (1, *spec.logical_shape))
        if kind == RESIDUAL and self.slot is not None:
            spec = self.slot.spec
            offsets, shape = (at[0], *spec.offsets()), (self.holders[0], *spec.logical_shape)
            return shard_of_local(part.unsqueeze(0), offsets, shape)
        offsets = (*at, *([0] * part.dim()))
        return LogicalShard((*self.holders, *part.shape), part.dtype, [TensorBox(offsets, part.detach()[None, None])])


class CompressorCheckpoint:
    """The compressors' state of one rank, for saving and loading.

    Args:
        sync: the compressors of gradients.
        channel: the channel of pipeline messages.
        layout, coordinates: the mesh and this rank's place in it.
        first_layers: first layer of each virtual stage, which name the boundaries before them.
        cut: messages hold this tensor-parallel rank's share of the sequence.
    """

    def __init__(
        self,
        sync: GradientSync,
        channel: PipelineChannel | None,
        layout: Layout,
        coordinates: Coordinates,
        first_layers: Sequence[int],
        cut: bool = False,
    ) -> None:
        self.sync = sync
        self.channel = channel
        self.layout = layout
        self.at = coordinates
        self.first_layers = first_layers
        self.cut = cut

    def tensors(self) -> dict[str, LogicalShard]:
        """All committed tensors, by name."""
        found: dict[str, LogicalShard] = {}
        for place in self._places():
            for kind, tensor in place.state.portable().items():
                found[place.label(kind)] = place.shard(kind, place.part(kind, tensor))
            for kind, count in place.state.counters.items() if place.leads else ():
                value = torch.tensor([count], dtype=torch.int64)
                found[place.label(_COUNTER + kind)] = place.shard(kind, value)
        return found

    def load(self, root: str | Path, iteration: Iteration, group: dist.ProcessGroup | None, log: Log) -> None:
        """Restores what a checkpoint has for this run's compressors. Every rank of the group calls this.

        Raises:
            UserError: on every rank, when the checkpoint is damaged.
        """
        saved = saved_shapes(root, iteration, PREFIX)
        if not saved:
            return
        wanted = [_Loaded(item) for place in self._places() for item in _wanted(saved, place)]
        for turn in range(_largest(group, max([len(one.item.sources) for one in wanted] + [1]))):
            parts = {one.item.name: one.item.room() for one in wanted if turn < len(one.item.sources)}
            now = [one for one in wanted if one.item.name in parts]
            read = {one.item.name: one.item.shard(parts[one.item.name], one.item.sources[turn]) for one in now}
            load_tensors(root, iteration, read, group, strict=False, allow_unexpected=True)
            for one in now:
                one.add(parts[one.item.name], parts.get(one.item.counts))
        for one in wanted:
            one.put()
        _warn(set(saved), {one.item.name for one in wanted}, group, log)

    def _places(self) -> Iterator[_Place]:
        dp, tp = (self.layout.dp, self.at.dp), (self.layout.tp, self.at.tp)
        holders, holder = (dp[0], tp[0]), (dp[1], tp[1])
        for buffer, reducer in zip(self.sync.buffers, self.sync.reducers, strict=True):
            for bucket, units in zip(buffer.buckets, reducer.units, strict=True):
                slots = {slot.start - bucket.start: slot for slot in bucket.slots}
                for unit in units:
                    yield from self._of_unit(unit, slots, bucket.stop - bucket.start, reducer)
        for tied in self.sync.ties if self.sync.plan.compressed(Point.EMBED_GRAD) else ():
            group, slot = tied.sync.group, tied.slot
            name = f"{Point.EMBED_GRAD.value}.{slot.logical_name}"
            at = (group.rank, tp[1])
            index_sets = self.sync.plan.rounds(Point.EMBED_GRAD).traits.index_sets
            size = (group.size, tp[0])
            yield _Place(name, tied.sync.state, size, at, index=0, whole=1, slot=slot, index_sets=index_sets)
        for way in (self.channel.forward, self.channel.backward) if self.channel is not None else ():
            if self.channel is not None and self.channel.plan.compressed(way.point):
                for end, states, boundary in self._ends(way):
                    state = states.setdefault(boundary, CompressorState())
                    # What was learned of whole messages says nothing of their parts, and the other way around.
                    part = "" if self.channel.parts is None else ".part"
                    name = f"{way.point.value}.layer{self.first_layers[boundary + 1]}.{end}{part}"
                    means = dict(self.channel.plan.codec(way.point).traits.means)
                    yield _Place(name, state, holders, holder, means=means, cut=self.cut)

    def _of_unit(
        self, unit: Unit, slots: Mapping[int, ParamSlot], length: int, reducer: GradReducer
    ) -> Iterator[_Place]:
        """The parameters of a unit: those of its stack, or all of its bucket (of some length)."""
        starts = [place.start for place in unit.places] or sorted(slots)
        replicas = reducer.group
        for index, start in enumerate(starts):
            slot = slots[start]
            # All stages of a tied embedding contribute to one sum, each with a residual of its own.
            stages = (self.at.pp,) if slot.spec.tied is None else self.layout.holders(slot.spec.tied)
            yield _Place(
                f"{Point.DP_GRAD.value}.{slot.logical_name}",
                unit.state,
                holders=(replicas.size * len(stages), self.layout.tp),
                holder=(replicas.rank + replicas.size * stages.index(self.at.pp), self.at.tp),
                index=index if unit.places else None,
                span=None if unit.places else (start, start + slot.stop - slot.start),
                whole=len(starts) if unit.places else length,
                slot=slot,
                leads=index == 0,
                index_sets=reducer.compressor.traits.index_sets,
            )

    def _ends(self, way: Direction) -> Iterator[tuple[str, dict[int, CompressorState], int]]:
        """This rank's ends of the boundaries, in one direction."""
        last = self.layout.num_virtual_stages - 1
        for chunk in range(self.layout.chunks):
            stage = self.layout.virtual_stage(self.at.pp, chunk)
            outgoing, incoming = (stage, stage - 1) if way.point is Point.PP_FWD else (stage - 1, stage)
            if 0 <= outgoing < last:
                yield "sender", way.sent, outgoing
            if 0 <= incoming < last:
                yield "receiver", way.received, incoming


@dataclass(frozen=True)
class _Wanted:
    """A tensor of a checkpoint that this rank can restore, whole or in part.

    Args:
        place: its place in this rank's state.
        kind: its name in the state.
        shape, dtype: those in the checkpoint, holders included.
    """

    place: _Place
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.place.label(self.kind)

    @property
    def fits(self) -> bool:
        """Whether this layout can hold it: any layout for a parameter's residual, else one with the same shards."""
        if not all(self.shape) or (len(self.shape) < 2 and not self.kind.endswith(_OF_SAMPLES)):
            return False  # nothing that a run writes
        if self.kind.startswith(_COUNTER) and math.prod(self.shape[2:]) != 1:
            return False
        if self.kind.endswith(_OF_SAMPLES):
            return True
        if self._like_param and self.place.slot is not None:
            return self.shape[1:] == self.place.slot.spec.logical_shape
        return self.shape[1] == self.place.holders[1] or self._of_means

    @property
    def counts(self) -> str:
        """The name of what a table of means counts; empty for anything else."""
        return self.place.label(self.place.means[self.kind]) if self.kind in self.place.means else ""

    @property
    def _of_means(self) -> bool:
        return self.kind in self.place.means or self.kind in self.place.means.values()

    @property
    def _like_param(self) -> bool:
        return self.place.slot is not None and self.kind in (RESIDUAL, *self.place.index_sets)

    @property
    def sources(self) -> Sequence[tuple[int, int]]:
        """The holders whose parts make up this rank's."""
        (row, column), rows, columns = self.place.holder, self.shape[0], self.place.holders[1]
        if self.kind in self.place.index_sets or self.kind.endswith(_OF_SAMPLES):
            return [(0, column)]
        same_rows = rows == self.place.holders[0]
        if self._of_means:
            # Where all of them must be equal, those that were saved may be means of different things.
            alone = self.place.cut and self.shape[1] == columns
            which = (column,) if alone else range(self.shape[1])
            return [(at, other) for at in ((row,) if same_rows else range(rows)) for other in which]
        if same_rows:
            return [(row, column)]
        return [(at, column) for at in (range(rows) if self.kind == RESIDUAL else (0,))]

    def room(self) -> Tensor:
        """Allocates memory for this rank's part."""
        if self._like_param and self.place.slot is not None:
            param = self.place.slot.param
            return torch.zeros(param.shape, dtype=self.dtype, device=param.device)
        return torch.zeros(self.shape if self.kind.endswith(_OF_SAMPLES) else self.shape[2:], dtype=self.dtype)

    def shard(self, part: Tensor, at: tuple[int, int]) -> LogicalShard:
        """The part as a holder's box of the saved tensor."""
        if self.kind.endswith(_OF_SAMPLES):
            return self.place.shard(self.kind, part)
        columns = self.place.holders[1] if self._like_param else self.shape[1]
        return replace(self.place, holders=(self.shape[0], columns)).shard(self.kind, part, at)

    def put(self, part: Tensor) -> None:
        """Writes the part to its place, allocating the rest of its stack or bucket."""
        place, state = self.place, self.place.state
        if self.kind.startswith(_COUNTER):
            state.counters[self.kind.removeprefix(_COUNTER)] = int(part)
            return
        if self.kind == RESIDUAL and self.shape[0] != place.holders[0]:
            part.div_(place.holders[0])
        if self.kind in place.index_sets and place.index is not None:
            own = part.view(-1).nonzero().view(-1) + place.index * part.numel()
            others = state.tensors.get(self.kind)
            state.tensors[self.kind] = own if others is None else torch.cat([others, own]).sort().values
            return
        if place.whole == 0:
            state.tensors[self.kind] = part
            return
        if self.kind not in state.tensors:
            rest = part.shape if place.index is not None else ()
            state.tensors[self.kind] = torch.zeros((place.whole, *rest), dtype=part.dtype, device=part.device)
        place.part(self.kind, state.tensors[self.kind]).copy_(part)


class _Loaded:
    """What was read of a wanted tensor so far, put together."""

    def __init__(self, item: _Wanted) -> None:
        self.item = item
        self._value: Tensor | None = None
        self._weights: Tensor | None = None

    def add(self, part: Tensor, counts: Tensor | None) -> None:
        """Adds a holder's part; ``counts`` are those of a table of means.

        Parts that are equal stay as they are, bit by bit. Counts become the greatest: equal ones are not counted twice.
        """
        if self._value is None:
            self._value, self._weights = part, counts
        elif counts is not None and self._weights is not None:
            self._weights = self._weights + counts
            share = (counts / self._weights.clamp(min=1)).view(-1, *[1] * (part.dim() - 1))
            self._value.add_(share * (part - self._value))
        elif self.item.kind == RESIDUAL:
            self._value.add_(part)
        else:
            self._value = torch.maximum(self._value, part)

    def put(self) -> None:
        """Writes it to its place."""
        if self._value is not None:
            self.item.put(self._value)


def _wanted(saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]], place: _Place) -> Iterator[_Wanted]:
    """Tensors of a checkpoint for a place, which this layout can restore."""
    for name, (shape, dtype) in saved.items():
        item = _Wanted(place, name.rpartition("|")[2], shape, dtype)
        if name == item.name and item.fits and (place.leads or not item.kind.startswith(_COUNTER)):
            yield item


def _largest(group: dist.ProcessGroup | None, value: int) -> int:
    return max(int(text) for text in gather_texts(group, str(value)))


def _warn(saved: set[str], used: set[str], group: dist.ProcessGroup | None, log: Log) -> None:
    """Warns about tensors of the checkpoint that no rank of this run restored."""
    everyones: set[str] = set()
    for text in gather_texts(group, json.dumps(sorted(used))):
        everyones.update(json.loads(text))
    lost = [name for name in sorted(saved - everyones) if f"|{_COUNTER}" not in name]
    if lost:
        names = ", ".join(name.removeprefix(PREFIX).replace("|", " ") for name in lost[:4])
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        log(f"warning: compressor state of the checkpoint has no place in this run and is left out: {names}{more}")
