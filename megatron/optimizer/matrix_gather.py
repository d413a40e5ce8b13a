"""Whole matrices from distributed parts: an owner rank assembles each one, changes it, and scatters it again.

Tensor-parallel ranks hold slices of a matrix, and the replicas of a sharded optimizer hold ranges of a slice. Each
matrix has an owner among all of them. The replicas send their ranges to the owner's replica, and its tensor-parallel
ranks send their slices to the owner; the changed matrix goes back the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.parallel.data.buffer import Bucket, FlatBuffer, ParamSlot
from megatron.parallel.data.gradient_sync import overlap_slots, replica_share
from megatron.parallel.data.param_shards import ParamShard
from megatron.parallel.tensor.shards import ParamSpec

Change = Callable[[Tensor, ParamSpec], Tensor]
"""Maps a whole matrix (of its logical shape) to a matrix of the same shape and dtype."""

Ranges = Sequence[tuple[int, int]]
"""(start, stop) of each replica's range of a flat slice."""

_SLACK = 0.05
"""Fraction by which a replica may exceed its share of the work, to own matrices that it holds."""


@dataclass(frozen=True)
class _MatrixJob:
    """A matrix and its owner.

    Args:
        slot: its parameter on this rank.
        ranges: the ranges of the replicas; empty where the matrix is not sharded over them.
        replica, tensor: the owner's rank among the replicas, and its tensor-parallel rank.
    """

    slot: ParamSlot
    ranges: Ranges
    replica: int
    tensor: int


@dataclass(frozen=True)
class _Wave:
    """Matrices assembled at the same time, at most one per owner; ``replicas``, if not None, hold ranges of them."""

    replicas: Group | None
    jobs: tuple[_MatrixJob, ...]


class MatrixGather:
    """Access to the whole matrices of linear layers.

    With ``sharded``, each replica of a buffer holds ranges of its slices. Otherwise every replica holds the full slices
    and repeats the computation of the others: nothing is sent between replicas.

    Args:
        shards: the shards that this rank updates.
        buffers: all parameters that this rank holds, in the order that their holders share.
        tp: the tensor-parallel ranks, which hold slices of the same matrices.
        sharded: whether replicas hold ranges of the slices.
        ledger: ledger that counts the bytes.
    """

    def __init__(
        self, shards: Sequence[ParamShard], buffers: Sequence[FlatBuffer], tp: Group, sharded: bool, ledger: Ledger
    ) -> None:
        self._tp, self._ledger = tp, ledger
        self._device = buffers[0].params_flat.device
        self._slots = [shard.slot for shard in shards]
        self._waves: list[_Wave] = []
        for group in {id(buffer.group): buffer.group for buffer in buffers}.values():
            replicas = group if sharded and group.size > 1 else None
            of_group = [buffer for buffer in buffers if buffer.group is group]
            buckets = [bucket for buffer in of_group for bucket in buffer.buckets]
            self._waves += _plan_waves(held_ranges(buckets, replicas.size if replicas else 0), replicas, tp.size)

    def change(self, shard_values: Sequence[Tensor | None], dtype: torch.dtype, change: Change) -> None:
        """Change matrices in place. A collective call of all ranks that hold parts of them.

        Args:
            shard_values: flat values of a matrix for each matrix shard; None for other parameters.
            dtype: dtype of the parts.
            change: called by the owner of a matrix, and by all tensor-parallel ranks where each holds the whole matrix.
        """
        values_by_slot = {
            id(slot): flat for slot, flat in zip(self._slots, shard_values, strict=True) if flat is not None
        }
        empty = torch.empty(0, dtype=dtype, device=self._device)
        for wave in self._waves:
            if wave.replicas is None:
                self._change_slices(wave.jobs, [values_by_slot[id(job.slot)] for job in wave.jobs], empty, change)
                continue
            # The replicas send their ranges of slices to the owners, and receive the changed ranges.
            size, rank = wave.replicas.size, wave.replicas.rank
            jobs_by_owner = [[job for job in wave.jobs if job.replica == owner] for owner in range(size)]
            own_jobs = jobs_by_owner[rank]
            sent = [[values_by_slot.get(id(job.slot), empty) for job in jobs] for jobs in jobs_by_owner]
            sizes = [[_length(job.ranges[source]) for job in own_jobs] for source in range(size)]
            received = self._exchange(wave.replicas, sent, sizes, empty)
            slices = [torch.cat(ranges) for ranges in zip(*received, strict=True)]
            del received  # frees its memory before the matrices change
            self._change_slices(own_jobs, slices, empty, change)
            own_slices = list(zip(own_jobs, slices, strict=True))
            sent = [[slice_n[slice(*job.ranges[target])] for job, slice_n in own_slices] for target in range(size)]
            sizes = [[_length(job.ranges[rank]) for job in jobs] for jobs in jobs_by_owner]
            changed = self._exchange(wave.replicas, sent, sizes, empty)
            for job, new_values in zip(chain(*jobs_by_owner), chain(*changed), strict=True):
                if new_values.numel():
                    values_by_slot[id(job.slot)].copy_(new_values)
            del changed

    def _change_slices(
        self, jobs: Sequence[_MatrixJob], slices: Sequence[Tensor], like: Tensor, change: Change
    ) -> None:
        """Change matrices in place, given this rank's slices; the other tensor-parallel ranks hold the other slices."""
        split_slices: list[tuple[_MatrixJob, Tensor]] = []
        for job, slice_n in zip(jobs, slices, strict=True):
            if self._tp.size > 1 and job.slot.spec.dim is not None:
                split_slices.append((job, slice_n))
            else:
                slice_n.copy_(change(slice_n.view(job.slot.param.shape), job.slot.spec).flatten())
        if not split_slices:
            return
        size, rank = self._tp.size, self._tp.rank
        sent = [[slice_n for job, slice_n in split_slices if job.tensor == other] for other in range(size)]
        own_jobs = [job for job, _ in split_slices if job.tensor == rank]
        received = self._exchange(self._tp, sent, [[job.slot.param.numel() for job in own_jobs]] * size, like)
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        for job, *tensor_slices in zip(own_jobs, *received, strict=True):
            spec, shape = job.slot.spec, job.slot.param.shape
            assert spec.dim is not None
            matrix = change(torch.cat([flat.view(shape) for flat in tensor_slices], dim=spec.dim), spec)
            for slices_of_rank, new_slice in zip(outgoing, matrix.chunk(size, dim=spec.dim), strict=True):
                slices_of_rank.append(new_slice.flatten())
        of_owner = [[slice_n for job, slice_n in split_slices if job.tensor == other] for other in range(size)]
        sizes = [[slice_n.numel() for slice_n in owner_slices] for owner_slices in of_owner]
        for owner_slices, changed_slices in zip(of_owner, self._exchange(self._tp, outgoing, sizes, like), strict=True):
            for slice_n, returned_values in zip(owner_slices, changed_slices, strict=True):
                slice_n.copy_(returned_values)

    def _exchange(
        self, group: Group, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """All-to-all of several flat tensors to each rank; ``sizes`` lists the tensors' sizes from each source rank."""
        outgoing = [torch.cat([like[:0], *tensors]) for tensors in sent]
        incoming = [like.new_empty(sum(counts)) for counts in sizes]
        incoming[group.rank] = outgoing[group.rank]
        self._ledger.complete(Point.OPTIMIZER, group.all_to_all_uneven(incoming, outgoing))
        return [list(flat.split(list(counts))) for flat, counts in zip(incoming, sizes, strict=True)]


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def held_ranges(buckets: Sequence[Bucket], replicas: int) -> list[tuple[ParamSlot, Ranges]]:
    """The matrices in buckets, and every replica's range of each; no ranges for 0 replicas."""
    matrix_ranges: list[tuple[ParamSlot, Ranges]] = []
    for bucket in buckets:
        shares = [overlap_slots(bucket, replica_share(bucket, replicas, rank)) for rank in range(replicas)]
        ranges_of = [{index: (start, stop) for index, start, stop in share} for share in shares]
        matrix_ranges += [
            (slot, tuple(ranges.get(index, (0, 0)) for ranges in ranges_of))
            for index, slot in enumerate(bucket.slots)
            if slot.spec.blocks
        ]
    return matrix_ranges


def assign_owners(
    matrices: Sequence[tuple[ParamSlot, Ranges]], replicas: int, tensors: int
) -> Iterator[tuple[int, int, int]]:
    """Assign each matrix to an owner, the costliest first.

    The replica that holds most of a matrix owns it, unless that replica already has its share of the work. Then the
    replica with the next largest part does, and if none has room, the least loaded one.

    Returns:
        Index of the matrix, its owner's rank among the replicas, and its owner's tensor-parallel rank.
    """
    costs = [iteration_flops(slot.spec) for slot, _ in matrices]
    loads = [[0] * tensors for _ in range(replicas)]
    fair = sum(costs) * (1.0 + _SLACK) / replicas
    for index in sorted(range(len(matrices)), key=lambda index: -costs[index]):
        ranges = matrices[index][1]
        by_held = sorted(range(len(ranges)), key=lambda replica: -_length(ranges[replica])) or [0]
        with_room = (replica for replica in by_held if sum(loads[replica]) + costs[index] <= fair)
        replica = next(with_room, min(by_held, key=lambda replica: sum(loads[replica])))
        tensor = min(range(tensors), key=lambda tensor: loads[replica][tensor])
        loads[replica][tensor] += costs[index]
        yield index, replica, tensor


def _plan_waves(matrices: Sequence[tuple[ParamSlot, Ranges]], replicas: Group | None, tensors: int) -> Iterator[_Wave]:
    """Group matrices into waves, with at most one matrix per owner."""
    count = replicas.size if replicas else 1
    queues: dict[tuple[int, int], list[_MatrixJob]] = {(r, t): [] for r in range(count) for t in range(tensors)}
    for index, replica, tensor in assign_owners(matrices, count, tensors):
        queues[replica, tensor].append(_MatrixJob(*matrices[index], replica, tensor))
    for number in range(max(map(len, queues.values()))):
        yield _Wave(replicas, tuple(jobs[number] for jobs in queues.values() if number < len(jobs)))


def iteration_flops(spec: ParamSpec) -> int:
    """Operations of a Newton-Schulz iteration of a parameter's matrices: three products each."""
    *leading, columns = spec.logical_shape
    repeated = math.prod(leading) // max(sum(spec.blocks), 1)
    dimensions = [sorted((repeated * block, columns)) for block in spec.blocks]
    return sum(2 * short * short * (short + 2 * long) for short, long in dimensions)
