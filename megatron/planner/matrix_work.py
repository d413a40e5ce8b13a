"""Muon's work on the matrices of a device, assigned to owners as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.optimizer.matrix_gather import assign_owners, held_ranges, iteration_flops
from megatron.parallel.data.buffer import NamedParam, plan_buckets


@dataclass(frozen=True)
class MatrixWork:
    """Orthogonalization of the matrices on a device that are held by the same number of replicas.

    Args:
        updated: number of matrix parameters that the device updates.
        flops: FLOPs of an iteration on the device with the most work.
        replicas: number of replicas that hold these parameters.
        to_replicas, to_tensors: mean bytes that a device sends to its replicas and to its tensor-parallel ranks.
    """

    updated: float = 0.0
    flops: float = 0.0
    replicas: int = 1
    to_replicas: float = 0.0
    to_tensors: float = 0.0


def matrix_work(
    chunks: Sequence[Sequence[NamedParam]],
    replicas: int,
    tensors: int,
    *,
    sharded: bool,
    bucket_elements: int | None,
    itemsize: int,
) -> MatrixWork:
    """Plan the buckets of a device's chunks and assign their matrices to owners.

    Args:
        chunks: parameters of each chunk that are held by the same replicas, in forward order.
        replicas: number of replicas that hold them.
        tensors: number of tensor-parallel ranks.
        sharded: whether parameters are sharded over the replicas.
        bucket_elements: size at which buckets are closed; None for no limit.
        itemsize: bytes of a sent element.
    """
    owners = replicas if sharded else 1
    buckets = [bucket for params in chunks for bucket in plan_buckets(params, owners, bucket_elements, tensors > 1)]
    matrices = held_ranges(buckets, owners if owners > 1 else 0)
    flops = [[0] * tensors for _ in range(owners)]
    elements = elements_elsewhere = split_elements = 0
    for index, replica, tensor in assign_owners(matrices, owners, tensors):
        slot, ranges = matrices[index]
        numel = slot.param.numel()
        elements += numel
        if ranges:
            start, stop = ranges[replica]
            elements_elsewhere += numel - (stop - start)
        is_split = tensors > 1 and slot.spec.dim is not None
        split_elements += numel if is_split else 0
        # Every tensor-parallel rank of the owner holds an unsplit matrix and orthogonalizes it.
        for rank in [tensor] if is_split else range(tensors):
            flops[replica][rank] += iteration_flops(slot.spec)
    bytes_per_element = 2.0 * itemsize / owners
    return MatrixWork(
        elements / owners,
        max(map(max, flops)),
        replicas,
        bytes_per_element * elements_elsewhere,
        bytes_per_element * split_elements * (tensors - 1) / tensors,
    )
