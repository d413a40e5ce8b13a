"""Trial reductions of copies of a step's gradients, to measure their time and error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.compression.api import Trial
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.kernels.ops import finite_norm
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket
from megatron.parallel.data.tied_embedding import EmbeddingSync


@dataclass(frozen=True)
class TrialReduction:
    """A trial reduction.

    Args:
        reduced: the step's reduced gradients, contiguous.
        local_range: range of the gradients that this rank holds.
        fill: gathers the other ranks' ranges of a copy.
        run: reduces a copy over the group, in place.
        ranks: number of ranks of the group.
        states: compressor states of the trial.
    """

    reduced: Tensor
    local_range: slice
    fill: Callable[[Tensor], None]
    run: Callable[[Tensor], None]
    ranks: int
    states: Sequence[CompressorState]


def make_bucket_trial(
    bucket: GradBucket, group: Group, plan: CompressionPlan, ledger: Ledger, sharded: bool, scale: float
) -> TrialReduction:
    """Trial of the data-parallel reduction of a bucket; its gradients carry the loss scale ``scale``."""
    flat, size = bucket.flat, group.size if sharded else 1
    share = flat.numel() // size
    local_range = slice(group.rank * share, (group.rank + 1) * share) if sharded else slice(0, flat.numel())
    copied = GradBucket(flat, bucket.ranges)
    reducer = GradReducer([copied], group, plan, ledger, sharded)

    def fill(copy: Tensor) -> None:
        if sharded:
            ledger.complete(Point.DP_GRAD, group.all_gather(copy, copy[local_range]), 0)

    def run(copy: Tensor) -> None:
        copied.flat = copy
        reducer.begin_step(0, scale)
        reducer.finish_reduction()

    return TrialReduction(
        flat, local_range, fill, run, group.size, [unit.state for units in reducer.units for unit in units]
    )


def make_embedding_trial(
    grad: Tensor, shape: tuple[int, ...], sync: EmbeddingSync, plan: CompressionPlan, scale: float
) -> TrialReduction:
    """Trial of the all-reduce of a tied embedding's gradient; ``grad`` is this rank's part."""
    trial_sync = EmbeddingSync(sync.group, plan, sync.ledger, sync.replicas)
    trial_sync.begin_step(0)
    return TrialReduction(
        grad,
        slice(0, grad.numel()),
        lambda copy: None,
        lambda copy: trial_sync.all_reduce(copy, shape, scale),
        sync.group.size,
        [trial_sync.state],
    )


def run_trial(trial: Trial, reductions: Iterable[TrialReduction], world: Group, ledger: Ledger) -> Tensor:
    """Run trial reductions one by one, with memory for a single copy; every rank of the world must call it.

    Returns:
        The figures documented at ``Trial``.
    """
    synchronize_ranks(world, ledger)
    figures_3 = torch.zeros(3, dtype=torch.float64)
    for reduction in reductions:
        figures_3 += _measure(trial, reduction, ledger)
    return figures_3


def _measure(trial: Trial, reduction: TrialReduction, ledger: Ledger) -> Tensor:
    copy, reduced, seconds = torch.empty_like(reduction.reduced), reduction.reduced, []
    error, norm = torch.zeros((), dtype=torch.float64), finite_norm(reduced[reduction.local_range])[0].cpu()
    for repeat in range(trial.repeats):
        # Each rank contributes an equal part, so that the sum has the magnitude of the step's gradients.
        copy[reduction.local_range].copy_(reduced[reduction.local_range]).div_(reduction.ranks)
        reduction.fill(copy)
        seconds.append(_seconds(ledger, lambda: reduction.run(copy)))
        if repeat == 0:
            error = finite_norm(copy[reduction.local_range].sub_(reduced[reduction.local_range]))[0].cpu()
        for state in reduction.states:
            state.commit()
    later = seconds[1:] or seconds
    return torch.stack([torch.tensor(sum(later) / len(later), dtype=torch.float64), error, norm])


def synchronize_ranks(world: Group, ledger: Ledger) -> float:
    """Synchronize all ranks and their devices; return the seconds that this rank has waited."""
    return _seconds(ledger, lambda: ledger.complete(Point.CONTROL, world.all_reduce(torch.zeros(1))))


def _seconds(ledger: Ledger, call: Callable[[], None]) -> float:
    """Seconds of a call, including the work it launches on this rank's device, by the ledger's clock."""
    clock, durations = ledger.clock, list[float]()
    clock.synchronize()
    start = clock.mark()
    call()
    clock.between(start, clock.mark(), durations.append)
    clock.synchronize()
    return durations[0]
