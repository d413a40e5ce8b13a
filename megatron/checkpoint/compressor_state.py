"""Compressor state as logical tensors: saved with the model, and re-sliced or summed on another layout.

The leading dimensions of every tensor index its holders. A residual corrects its holder's contribution to a sum: when
the number of replicas changes, the sum of the residuals is preserved and divided equally. Tables of means are averaged
over all holders, so that both ends of a message stay equal. Any other state (warm-start factors) needs the same
holders, or is dropped with a warning that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.files import Iteration
from megatron.checkpoint.load import load_tensors, saved_shapes
from megatron.checkpoint.logical import LogicalShard
from megatron.checkpoint.save import Log
from megatron.checkpoint.state_slice import COUNTER, PREFIX, SAMPLE_SUFFIXES, StateSlice
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.diloco.outer_sync import OuterSync
from megatron.distributed.agreement import gather_texts
from megatron.distributed.group import Group
from megatron.distributed.layout import Coordinates, Layout
from megatron.kernels.dtypes import dtype_from_name, name_of_dtype
from megatron.parallel.data.buffer import ParamSlot
from megatron.parallel.data.gradient_sync import GradientSync
from megatron.parallel.data.reducer import BucketReducer, ParamStack
from megatron.parallel.pipeline.channel import PipelineChannel


@dataclass(eq=False)
class CompressorCheckpoint:
    """A rank's compressor state, as checkpoints hold it.

    Args:
        sync: gradient synchronization, with its compressors.
        channel: the channel of pipeline messages.
        layout, at: the mesh and this rank's coordinates in it.
        first_layers: first layer of each virtual stage; names the boundary before the stage.
        cut: whether messages hold this tensor-parallel rank's share of the sequence.
        outer: the outer optimizer's rounds between islands.
    """

    sync: GradientSync
    channel: PipelineChannel | None
    layout: Layout
    at: Coordinates
    first_layers: Sequence[int]
    cut: bool = False
    outer: OuterSync | None = None

    def tensors(self, group: dist.ProcessGroup | None = None) -> dict[str, LogicalShard]:
        """Committed state tensors, by name. Every rank of the group calls this."""
        shards: dict[str, LogicalShard] = {}
        tied: dict[str, tuple[StateSlice, Tensor]] = {}
        for state_slice in self._slices():
            slices = {
                kind: state_slice.read_slice(kind, tensor)
                for kind, tensor in state_slice.state.export_tensors().items()
            }
            if state_slice.leads:
                counters = state_slice.state.counters.items()
                slices |= {COUNTER + kind: torch.tensor([count], dtype=torch.int64) for kind, count in counters}
            for kind, local in slices.items():
                shards[state_slice.label(kind)] = state_slice.shard(kind, local)
                if state_slice.stage[1] > 1 and kind not in state_slice.index_sets:
                    tied[state_slice.label(kind)] = state_slice, local
        if group is None or not self.layout.ties or not self.sync.plan.is_compressed(Point.DP_GRAD):
            return shards
        # The stages that hold a tied parameter may have different compressors. They save a single residual, to which a
        # stage without one contributes zeros. Other state is saved under stage-specific names, unless its form is the
        # same on all stages.
        buckets = [(buffer.group, bucket) for buffer in self.sync.buffers for bucket in buffer.buckets]
        grad_slices = [self._grad_slice(slot, replicas) for replicas, bucket in buckets for slot in bucket.slots]
        held_slices = {state_slice.name: state_slice for state_slice in grad_slices if state_slice.stage[1] > 1}
        forms = {label: [list(shards[label].global_shape), name_of_dtype(shards[label].dtype)] for label in tied}
        rows = [json.loads(text) for text in gather_texts(group, json.dumps([sorted(held_slices), forms]))]
        for label in sorted({label for _, row in rows for label in row}):
            name, _, kind = label.removeprefix(PREFIX).rpartition("|")
            stage_forms = [row.get(label) for held_names, row in rows if name in held_names]
            if name not in held_slices or all(form == stage_forms[0] for form in stage_forms):
                continue
            if kind == RESIDUAL:
                state_slice, form = held_slices[name], next(form for form in stage_forms if form is not None)
                if label not in shards and state_slice.slot is not None:
                    zeros = torch.zeros(state_slice.slot.param.shape, dtype=dtype_from_name(form[1]))
                    shards[label] = state_slice.shard(RESIDUAL, zeros)
            elif label in tied:
                stage_specific, local = tied[label][0].stage_specific, tied[label][1]
                del shards[label]
                shards[stage_specific.label(kind)] = stage_specific.shard(kind, local)
        return shards

    def load(self, root: str | Path, iteration: Iteration, group: dist.ProcessGroup | None, log: Log) -> None:
        """Restore this run's compressor state from a checkpoint. Every rank of the group calls this.

        Raises:
            UserError: on every rank, when the checkpoint is damaged.
        """
        saved = saved_shapes(root, iteration, PREFIX)
        if not saved:
            return
        device = self.sync.buffers[0].params_flat.device
        entries = []
        for state_slice in self._slices():
            candidates = (state_slice, state_slice.stage_specific) if state_slice.stage[1] > 1 else (state_slice,)
            for (name, (shape, dtype)), candidate in product(saved.items(), candidates):
                entry = _LoadableState(candidate, name.rpartition("|")[2], shape, dtype, device)
                if name == entry.name and entry.fits:
                    entries.append(entry)
        most_sources = max([len(entry.sources) for entry in entries] + [1])
        for turn in range(max(int(text) for text in gather_texts(group, str(most_sources)))):
            slices = {entry.name: entry.allocate() for entry in entries if turn < len(entry.sources)}
            active = [entry for entry in entries if entry.name in slices]
            read = {entry.name: entry.shard(slices[entry.name], entry.sources[turn]) for entry in active}
            load_tensors(root, iteration, read, group, allow_unexpected=lambda name: True)
            for entry in active:
                entry.add_slice(slices[entry.name], slices.get(entry.counts))
        for entry in entries:
            if entry.kind.startswith(COUNTER):
                entry.state_slice.state.counters.pop(entry.kind.removeprefix(COUNTER), None)
        for entry in entries:
            if entry.value is not None:
                entry.write(entry.value)
        restored: set[str] = set()  # by any rank
        for text in gather_texts(group, json.dumps(sorted({entry.name for entry in entries}))):
            restored.update(json.loads(text))
        lost = [name for name in sorted(set(saved) - restored) if f"|{COUNTER}" not in name]
        if lost:
            names = ", ".join(name.removeprefix(PREFIX).replace("|", " ") for name in lost[:4])
            more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
            log(f"warning: compressor state of the checkpoint has no place in this run and is left out: {names}{more}")

    def _slices(self) -> Iterator[StateSlice]:
        dp, tp = (self.layout.dp, self.at.dp), (self.layout.tp, self.at.tp)
        holders, holder = (dp[0], tp[0]), (dp[1], tp[1])
        for buffer, reducer in zip(self.sync.buffers, self.sync.reducers, strict=True):
            for bucket, units in zip(buffer.buckets, reducer.units, strict=True):
                slots = {slot.start - bucket.start: slot for slot in bucket.slots}
                for unit in units:
                    yield from self._slices_of_unit(unit, slots, bucket.stop - bucket.start, reducer, self._grad_slice)
        for fragment in self.outer.fragments if self.outer is not None else ():
            for exchanged, units in zip(fragment.exchanged_buckets, fragment.reducer.units, strict=True):
                starts = zip(exchanged.reduced.ranges, exchanged.slots, strict=True)
                slots = {param_range.start: slot for param_range, slot in starts}
                for unit in units:
                    yield from self._slices_of_unit(unit, slots, exchanged.length, fragment.reducer, self._outer_slice)
        for tied in self.sync.ties if self.sync.plan.is_compressed(Point.EMBED_GRAD) else ():
            group, slot = tied.sync.group, tied.slot
            name = f"{Point.EMBED_GRAD.value}.{slot.logical_name}"
            at = (group.rank, tp[1])
            index_sets = self.sync.plan.rounds(Point.EMBED_GRAD).traits.index_sets
            size = (group.size, tp[0])
            yield StateSlice(name, tied.sync.state, size, at, index=0, length=1, slot=slot, index_sets=index_sets)
        crossing = {b for b in range(self.layout.num_virtual_stages - 1) if self.layout.crosses(b)}
        for direction in (self.channel.forward, self.channel.backward) if self.channel is not None else ():
            if self.channel is None or not self.channel.plan.is_compressed(direction.point):
                continue
            means = dict(self.channel.plan.codec(direction.point).traits.means)
            # State of whole messages cannot be used for partial messages, nor the reverse.
            suffix = "" if self.channel.tensor_comm is None else ".part"
            for chunk in range(self.layout.chunks):
                stage = self.layout.virtual_stage(self.at.pp, chunk)
                outgoing, incoming = (stage, stage - 1) if direction.point is Point.PP_FWD else (stage - 1, stage)
                ends = (("sender", direction.sent, outgoing), ("receiver", direction.received, incoming))
                for end, states, boundary in ends:
                    if boundary in crossing:
                        state = states.setdefault(boundary, CompressorState())
                        name = f"{direction.point.value}.layer{self.first_layers[boundary + 1]}.{end}{suffix}"
                        yield StateSlice(name, state, holders, holder, means=means, cut=self.cut)

    def _slices_of_unit(
        self,
        unit: ParamStack,
        slots: Mapping[int, ParamSlot],
        length: int,
        reducer: BucketReducer,
        slice_of: Callable[[ParamSlot, Group], StateSlice],
    ) -> Iterator[StateSlice]:
        """Slices for a unit's stacked parameters, or for all parameters of its bucket of ``length`` elements."""
        starts = [param_range.start for param_range in unit.ranges] or sorted(slots)
        for index, start in enumerate(starts):
            slot = slots[start]
            yield replace(
                slice_of(slot, reducer.group),
                state=unit.state,
                index=index if unit.ranges else None,
                span=None if unit.ranges else (start, start + slot.stop - slot.start),
                length=len(starts) if unit.ranges else length,
                leads=index == 0,
                index_sets=reducer.compressor.traits.index_sets,
            )

    def _outer_slice(self, slot: ParamSlot, islands: Group) -> StateSlice:
        """Slice of a parameter at ``OUTER``, still without state. Its only holder is this island, which has its own
        checkpoint."""
        name, holder = f"{Point.OUTER.value}.{slot.logical_name}", (0, self.at.tp)
        return StateSlice(name, CompressorState(), holders=(1, self.layout.tp), holder=holder, slot=slot)

    def _grad_slice(self, slot: ParamSlot, replicas: Group) -> StateSlice:
        """Slice of a parameter at ``DP_GRAD``, still without state; ``replicas`` reduce its gradient."""
        # All stages of a tied embedding contribute to the same sum, each with its own residual.
        stages = (self.at.pp,) if slot.spec.tied is None else self.layout.holders(slot.spec.tied)
        stage = stages.index(self.at.pp)
        tp, rank = (1, 0) if slot.spec.unshared else (self.layout.tp, self.at.tp)
        return StateSlice(
            f"{Point.DP_GRAD.value}.{slot.logical_name}",
            CompressorState(),
            holders=(replicas.size * len(stages), tp),
            holder=(replicas.rank + replicas.size * stage, rank),
            slot=slot,
            stage=(stage, len(stages)),
        )


@dataclass(eq=False)
class _LoadableState:
    """A checkpoint tensor that this rank can restore, in full or in part.

    Args:
        state_slice: slice of this rank's state to restore.
        kind: name of the tensor in the state.
        shape, dtype: shape (with the holder dimensions) and dtype in the checkpoint.
        device: device of the run's parameters.
        value: this rank's slice, combined from those of the holders read so far; None before the first.
    """

    state_slice: StateSlice
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: Tensor | None = None
    _weights: Tensor | None = None

    @property
    def name(self) -> str:
        return self.state_slice.label(self.kind)

    @property
    def fits(self) -> bool:
        """Whether this layout can use it: a parameter's residual fits any layout, other state only the same shards."""
        if not all(self.shape) or (len(self.shape) < 2 and not self.kind.endswith(SAMPLE_SUFFIXES)):
            return False  # no run writes such a tensor
        if self.kind.startswith(COUNTER) and math.prod(self.shape[2:]) != 1:
            return False
        if self.kind.endswith(SAMPLE_SUFFIXES):
            return True
        if self._has_param_shape and self.state_slice.slot is not None:
            return self.shape[1:] == self.state_slice.slot.spec.logical_shape
        return self.shape[1] == self.state_slice.holders[1] or self._is_mean_table

    @property
    def counts(self) -> str:
        """Name of the counts of a table of means; empty for other tensors."""
        return self.state_slice.label(self.state_slice.means[self.kind]) if self.kind in self.state_slice.means else ""

    @property
    def _is_mean_table(self) -> bool:
        return self.kind in self.state_slice.means or self.kind in self.state_slice.means.values()

    @property
    def _has_param_shape(self) -> bool:
        return self.state_slice.slot is not None and self.kind in (RESIDUAL, *self.state_slice.index_sets)

    @property
    def sources(self) -> Sequence[tuple[int, int]]:
        """Holders whose slices are combined into this rank's slice."""
        (row, column), rows, columns = self.state_slice.holder, self.shape[0], self.state_slice.holders[1]
        if self.kind in self.state_slice.index_sets or self.kind.endswith(SAMPLE_SUFFIXES):
            return [(0, column)]
        same_rows = rows == self.state_slice.holders[0]
        if self._is_mean_table:
            # The columns must be equal in this run, but the saved columns may be means of different values.
            alone = self.state_slice.cut and self.shape[1] == columns
            source_columns = (column,) if alone else range(self.shape[1])
            return [(at, other) for at in ((row,) if same_rows else range(rows)) for other in source_columns]
        if same_rows:
            return [(row, column)]
        return [(at, column) for at in (range(rows) if self.kind == RESIDUAL else (0,))]

    def allocate(self) -> Tensor:
        """Allocate this rank's slice on the device, or on the host for counters and for samples, which may exceed the
        device's memory."""
        if self.kind.endswith(SAMPLE_SUFFIXES):
            return torch.zeros(self.shape, dtype=self.dtype)
        if self.kind.startswith(COUNTER):
            return torch.zeros(self.shape[2:], dtype=self.dtype)
        slot = self.state_slice.slot if self._has_param_shape else None
        shape = self.shape[2:] if slot is None else slot.param.shape
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def shard(self, values: Tensor, at: tuple[int, int]) -> LogicalShard:
        """The slice as a shard of the saved tensor, at the holder's indices."""
        if self.kind.endswith(SAMPLE_SUFFIXES):
            return self.state_slice.shard(self.kind, values)
        columns = self.state_slice.holders[1] if self._has_param_shape else self.shape[1]
        return replace(self.state_slice, holders=(self.shape[0], columns)).shard(self.kind, values, at)

    def add_slice(self, values: Tensor, counts: Tensor | None) -> None:
        """Add a holder's slice; ``counts`` are the counts of a table of means.

        Equal slices stay bitwise unchanged. Counts take the maximum, so that equal counts are not added twice.
        """
        if self.value is None:
            self.value, self._weights = values, counts
        elif counts is not None and self._weights is not None:
            self._weights = self._weights + counts
            share = (counts / self._weights.clamp(min=1)).view(-1, *[1] * (values.dim() - 1))
            self.value.add_(share * (values - self.value))
        elif self.kind == RESIDUAL:
            self.value.add_(values)
        else:
            self.value = torch.maximum(self.value, values)

    def write(self, values: Tensor) -> None:
        """Write a slice into the state, allocating the whole stack or bucket first if needed."""
        target, state = self.state_slice, self.state_slice.state
        if self.kind.startswith(COUNTER):
            # The counter may be saved under the name of another parameter; if there are several, keep the greatest.
            kind = self.kind.removeprefix(COUNTER)
            state.counters[kind] = max(state.counters.get(kind, 0), int(values))
            return
        if self.kind == RESIDUAL and self.shape[0] != target.holders[0]:
            values.div_(target.holders[0])
        if self.kind in target.index_sets and target.index is not None:
            indices = values.view(-1).nonzero().view(-1) + target.index * values.numel()
            previous = state.tensors.get(self.kind)
            state.tensors[self.kind] = indices if previous is None else torch.cat([previous, indices]).sort().values
            return
        if target.length == 0:
            state.tensors[self.kind] = values
            return
        if self.kind not in state.tensors:
            trailing_shape = values.shape if target.index is not None else ()
            state.tensors[self.kind] = torch.zeros(
                (target.length, *trailing_shape), dtype=values.dtype, device=values.device
            )
        target.read_slice(self.kind, state.tensors[self.kind]).copy_(values)
