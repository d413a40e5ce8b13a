"""Gathered differences, quantized momenta and their warm-up in training runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import LM_LOSS
from megatron.optimizer.step_summary import StepSummary
from megatron.parallel.data.buffer import ParamSlot
from megatron.parallel.data.gradient_sync import ReducedGradients, local_share
from megatron.training.assembly import Engines
from megatron.training.step import evaluation_step, take_batches
from tests.multiprocess.test_compression import EXACT_STEPS, OVERLAP, Changes, _dense, _run
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, tiny_batches, tiny_engines, tiny_run, tiny_train


def test_gathered_differences_follow_the_optimizer() -> None:
    """Nothing is lost for good: at 8 bits the run stays close to the dense one, at a quarter of the bytes."""
    exact = run_ranks(2, tiny_run, _run(use_distributed_optimizer=True), EXACT_STEPS)[0]
    ours = run_ranks(2, tiny_run, _run("param-gather=fixpoint,bits=8", use_distributed_optimizer=True), EXACT_STEPS)[0]
    assert ours.losses == pytest.approx(_dense().losses, rel=2e-3)
    assert ours.losses != exact.losses
    assert ours.bytes_by_point["param-gather"] < 0.27 * exact.bytes_by_point["param-gather"]


def _gathered(changes: Changes, iterations: int) -> tuple[list[int], Trace]:
    """The numbers in this rank's share of each bucket, and the trace of a run."""
    engines = tiny_engines(changes)
    shares = [local_share(bucket, engines.topology.dp, True) for buffer in engines.buffers for bucket in buffer.buckets]
    return [share.stop - share.start for share in shares], tiny_train(engines, iterations)


@pytest.mark.parametrize(
    ("spec", "group", "bits"),
    [("fixpoint,bits=4,group=2048", 2048, 4), ("float8", 128, 8)],
    ids=["4 bits", "8-bit float"],
)
def test_gathered_differences_send_the_bytes_of_the_formula(spec: str, group: int, bits: int) -> None:
    """To the byte: a scale of 4 bytes for each group, the codes of whole eights, all rounded up to 4 bytes."""
    ranks, iterations = 4, 3
    changes = _run(f"param-gather={spec}", precision="bf16", use_distributed_optimizer=True, **OVERLAP)
    for shares, trace in run_ranks(ranks, _gathered, changes, iterations):
        assert len(shares) > 1
        eights = 8 if bits < 8 else 1
        messages = [-(-(-(-n // group) * 4 + -(-n // eights) * eights * bits // 8) // 4) * 4 for n in shares]
        assert trace.bytes_by_point["param-gather"] == iterations * (ranks - 1) * sum(messages)
        assert trace.raw_by_point["param-gather"] == iterations * (ranks - 1) * sum(shares) * 2


def _quantized_adam(clip: float, bits: int, warmup: int = 4) -> Changes:
    # The symmetric grid has the most noise.
    changes = _run(f"dp-grad=quantized-adam,bits={bits},grid=symmetric,warmup={warmup}", precision="fp32")
    return {**changes, "optimizer": {"clip_grad": clip}}


def test_noise_of_few_bits_does_not_trip_clipping() -> None:
    """The answer's error is that of the momenta over 1 - beta: its norm is several times the gradient's."""
    free, clipped = (run_ranks(2, tiny_run, _quantized_adam(clip, bits=2), 12)[0] for clip in (0.0, 4.0))
    assert max(free.grad_norms[:4]) < 2.1, "a replica's gradient may be clipped: the case tests nothing"
    assert max(free.grad_norms[4:]) > 4.5, "there is no noise: the case tests nothing"
    assert clipped.losses == free.losses


def _frozen(changes: Changes, evaluates: bool = False) -> tuple[list[bool], list[int], int]:
    """Whether each step was skipped, after how many updates the second moments were frozen by then, and all the steps
    whose gradients were compressed; with an evaluation after each step, or none."""
    engines, frozen, on = tiny_engines(changes), [], 0

    def after(engines: Engines) -> None:
        nonlocal on
        frozen.append(engines.optimizer.frozen_at)
        on += engines.sync.freezes_variance
        if evaluates:
            held_out = tiny_batches(engines.config, engines.topology, masked=False, start=1000)
            evaluation_step(engines, take_batches(held_out, 2, engines.topology.device))

    trace = tiny_train(engines, 16, after_step=after)
    return [norm != norm for norm in trace.grad_norms], frozen, on


def test_a_warm_up_of_updates_does_not_count_skipped_steps() -> None:
    changes = _quantized_adam(1.0, bits=8, warmup=4)
    changes["precision"] = {"fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1}
    for skipped, frozen, _ in run_ranks(2, _frozen, changes):
        assert 2 <= sum(skipped) <= 10
        updates = [sum(not skip for skip in skipped[: step + 1]) for step in range(16)]
        assert frozen == [4 if count > 4 else 0 for count in updates]


def test_a_warm_up_of_updates_does_not_count_evaluations() -> None:
    """They are no steps that were skipped: a warm-up ends where it does without them, and does not begin anew."""
    for _, frozen, on in run_ranks(2, _frozen, _quantized_adam(1.0, bits=8, warmup=4), True):
        assert frozen == [0] * 4 + [4] * 12
        assert on == 12


def _local(full: Tensor, slot: ParamSlot) -> Tensor:
    """This rank's part of a logical tensor, with zeros for the vocabulary's padding."""
    shard, offsets = full.new_zeros(slot.param.shape), slot.spec.offsets()
    values = full[tuple(slice(at, at + size) for at, size in zip(offsets, shard.shape, strict=True))]
    shard[tuple(slice(0, size) for size in values.shape)] = values
    return shard


def _clipped_sum(layout: dict[str, int], max_norm: float) -> tuple[list[float], float]:
    """Norms of the replicas' gradients, and the greatest difference between the reduced gradients and the clipped
    sum."""
    changes = _quantized_adam(max_norm, bits=8, warmup=1)
    changes["parallel"] |= layout
    engines = tiny_engines(changes)
    sync, dp = engines.sync, engines.topology.dp
    slots = [slot for buffer in engines.buffers for bucket in buffer.buckets for slot in bucket.slots]

    def gradient(replica: int, slot: ParamSlot) -> Tensor:
        """Of a whole logical tensor: its value does not depend on the layout."""
        seed = replica + 10 * sum(map(ord, slot.logical_name))
        return torch.randn(slot.spec.logical_shape, generator=torch.Generator().manual_seed(seed)) * (1 + 2 * replica)

    tensors = {slot.logical_name: slot for slot in slots if not slot.spec.tied_copy}
    squares = torch.tensor([sum(gradient(r, s).square().sum() for s in tensors.values()) for r in range(dp.size)])
    engines.topology.pp.all_reduce(squares).wait()
    norms = squares.sqrt()
    engines.begin_step(1)
    sync.begin_step(1, 1.0)
    for buffer in engines.buffers:
        for slot in slots:
            tied = slot.spec.tied_copy
            mine = _local(gradient(dp.rank, slot), slot) / dp.size
            buffer.grads_flat[slot.start : slot.stop] = 0.0 if tied else mine.flatten()
    assert sync.reduce_gradients(64.0 * engines.holds_loss * (engines.topology.tp.rank == 0)).finite
    worst = 0.0
    for buffer in engines.buffers:
        for slot in slots:
            factors = [min(1.0, max_norm / float(norm)) for norm in norms]
            addends = [_local(gradient(r, slot), slot) * factors[r] / dp.size for r in range(dp.size)]
            expected = sum(addends[1:], addends[0]).flatten()
            if not slot.spec.tied:
                worst = max(worst, float((buffer.grads_flat[slot.start : slot.stop] - expected).abs().max()))
    return norms.tolist(), worst


@pytest.mark.parametrize(
    "layout", [{}, {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}], ids=str
)
def test_each_replica_is_clipped_by_the_norm_of_its_whole_model(layout: dict[str, int]) -> None:
    """Quantized momenta: by a plain computation from whole tensors, on any layout."""
    ranks = 2 * max(layout.values(), default=1)
    results = run_ranks(ranks, _clipped_sum, layout, 400.0)
    for norms, worst in results:
        assert norms[0] < 400.0 < norms[1], "one replica is to be clipped, and one not"
        assert norms == pytest.approx(results[0][0], rel=1e-5)
        assert worst < 0.1


def _fillings(parallel: dict[str, Any]) -> dict[str, float]:
    """The value that second moments of zero get when they are frozen, for each local logical tensor."""
    changes = _quantized_adam(1.0, bits=8)
    changes["parallel"] |= parallel
    engines = tiny_engines(changes)
    optimizer = engines.optimizer
    for piece in optimizer.shards:
        spec = piece.slot.spec
        full = torch.arange(math.prod(spec.logical_shape), dtype=torch.float64).view(spec.logical_shape) % 7
        mine = _local(full, piece.slot).flatten()[piece.start : piece.stop]
        optimizer.inner.state[piece.main]["exp_avg_sq"].copy_(mine)
    optimizer.steps = 3
    gradients = ReducedGradients(0, 1.0, freezes_variance=True)
    summary = optimizer.summarize(StepSummary({LM_LOSS: (1.0, 1.0)}), gradients)
    summary = summary.all_reduce(engines.topology, engines.ledger, engines.sync_warmup)
    optimizer.step(summary, gradients, lr=0.0, weight_decay=0.0)
    fillings: dict[str, float] = {}
    for piece in optimizer.shards:
        filled = optimizer.inner.state[piece.main]["exp_avg_sq"]
        fractional = filled[filled != filled.round()]
        if fractional.numel():
            assert float(fractional.min()) == float(fractional.max())
            fillings[piece.slot.logical_name] = float(fractional[0])
    return fillings


@pytest.mark.parametrize(
    "parallel", [{"tensor_model_parallel_size": 2}, {"use_distributed_optimizer": True}], ids=["tp2", "sharded"]
)
def test_moments_are_frozen_alike_on_every_layout(parallel: dict[str, Any]) -> None:
    """Zero moments take the mean of the whole tensor, not of a rank's part."""
    alone = _fillings({})
    assert len(alone) > 10
    fillings: dict[str, float] = {}
    for rank_fillings in run_ranks(2, _fillings, parallel):
        for name, filling in rank_fillings.items():
            assert filling == pytest.approx(alone[name], rel=1e-6), name
            fillings[name] = filling
    assert fillings.keys() == alone.keys()


def _trained(sharded: bool) -> tuple[list[float], list[dict[str, Tensor]], dict[str, dict[int, Tensor]]]:
    """Losses, the compressor's state of each bucket, and Adam's momenta of this rank's shards, by name and start."""
    changes = _quantized_adam(1.0, bits=8, warmup=2)
    changes["parallel"] |= {"use_distributed_optimizer": sharded, **OVERLAP}
    engines = tiny_engines({**changes, "model": {"num_layers": 2}})
    losses = tiny_train(engines, 7).losses
    states = [dict(state.export_tensors()) for reducer in engines.sync.reducers for state in reducer.states()]
    momenta: dict[str, dict[int, Tensor]] = {}
    for shard in engines.optimizer.shards:
        moment = engines.optimizer.inner.state[shard.main]["exp_avg"]
        momenta.setdefault(shard.slot.logical_name, {})[shard.start] = moment.flatten()
    return losses, states, momenta


def _trained_both_ways() -> list[Any]:
    return [_trained(sharded) for sharded in (False, True)]


def test_a_sharded_optimizer_takes_the_steps_of_whole_replicas() -> None:
    """To the bit. Each rank's next message needs the momenta of all shards at their scales, not of its own alone."""
    results = run_ranks(2, _trained_both_ways)
    for (losses, states, momenta), (sharded_losses, sharded_states, sharded_momenta) in results:
        assert sharded_losses == losses
        for state, sharded_state in zip(states, sharded_states, strict=True):
            assert sharded_state.keys() == state.keys() >= {"momentum", "residual"}
            assert all(torch.equal(sharded_state[name], x) for name, x in state.items())
        for name, shards in sharded_momenta.items():
            for start, shard in shards.items():
                assert torch.equal(shard, momenta[name][0][start : start + len(shard)]), name
    assert results[0][1][2].keys() | results[1][1][2].keys() == results[0][0][2].keys()
