"""``--delay 1`` beside compressors, evaluations, saves, and gradients that are not finite."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import LM_LOSS
from megatron.training.assembly import Engines
from megatron.training.evaluation import evaluate
from megatron.training.saved_run import find_saved
from megatron.training.step import evaluation_step, take_batches
from tests.multiprocess.test_delay_rule import DELAY, DOUBLE, EXTRAPOLATES, LOOKS_AHEAD, SGD, SHARDED, STEPS, Changes
from tests.multiprocess.test_no_flush import train_with_bad_step
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_batches, tiny_checkpoints, tiny_engines, tiny_run, tiny_train
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

COMPRESSORS = {
    "powersgd": ["dp-grad=powersgd,rank=2,min-ratio=0"],
    "fixpoint": ["dp-grad=fixpoint,bits=4"],
    "cast": ["dp-grad=cast"],
    "chunked top-k": ["dp-grad=chunked-topk,chunk=100,k=10"],
    "quantized Adam": ["dp-grad=quantized-adam,warmup=2"],
    "topk": ["dp-grad=topk,density=0.1"],
    "stable-topk": ["dp-grad=stable-topk,density=0.1,interval=2"],
    "server": ["dp-grad=parameter-server"],
    "warm-up": ["dp-grad=powersgd,rank=2,min-ratio=0,warmup=2"],
    "scheduled bits": ["dp-grad=fixpoint,bits=8@0/4@2"],
    "embedding": ["embedding=powersgd,rank=4@0/2@2,min-ratio=0"],
}


def _norms_and_states(changes: Changes, steps: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    engines = tiny_engines(changes)
    trace = tiny_train(engines, steps)
    if engines.delayed is not None:
        engines.delayed.settle_states()
    states = [{name: x.clone() for name, x in state.export_tensors().items()} for state in engines.sync.states()]
    return trace.grad_norms, states


def _compare_compressors(cases: dict[str, list[str]], layout: Changes) -> dict[str, str]:
    """Problems by case: without a learning rate, the reduced gradients come one step late and are the same."""
    problems = {}
    still: Changes = {"optimizer": {"lr": 0.0, "weight_decay": 0.0}, "model": {"num_layers": 2}}
    for name, specs in cases.items():
        changes = merge({"compression": {"compress": specs}}, still, layout)
        # After an even number of steps no compressor waits for an update.
        (norms, states), (late_norms, late_states) = (
            _norms_and_states(merge(changes, extra), 4) for extra in ({}, DELAY)
        )
        if late_norms[1:] != norms[:-1]:
            problems[name] = f"norms {norms} and {late_norms}"
        if [{k: x.tolist() for k, x in s.items()} for s in states] != [
            {k: x.tolist() for k, x in s.items()} for s in late_states
        ]:
            problems[name] = "states differ"
    return problems


ON_REPLICAS = COMPRESSORS.keys() - {"embedding"}
SCATTERED = {"powersgd", "stable-topk", "quantized Adam", "server"}  # kept factors or choices, a state of the optimizer
ON_STAGES = {"embedding", "powersgd"}
BUCKETS: dict[str, Any] = {"ddp_bucket_size": 3000}
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2, **BUCKETS}
COMPRESSED = [
    pytest.param(2, BUCKETS, ON_REPLICAS, id="dp2"),
    pytest.param(2, {**BUCKETS, **SHARDED}, SCATTERED, id="dp2 sharded"),
    pytest.param(2, {**BUCKETS, **SHARDED}, ON_REPLICAS - SCATTERED, id="dp2 sharded, others"),
    pytest.param(4, STAGES, ON_STAGES, id="pp2 dp2"),
    pytest.param(4, STAGES, COMPRESSORS.keys() - ON_STAGES, id="pp2 dp2, others"),
]


@pytest.mark.parametrize(
    ("ranks", "parallel", "names"), mark_repeats(COMPRESSED, keep=["dp2", "dp2 sharded", "pp2 dp2"])
)
def test_compressors_see_the_same_gradients(ranks: int, parallel: dict[str, Any], names: set[str]) -> None:
    cases = {name: specs for name, specs in COMPRESSORS.items() if name in names}
    for problems in run_ranks(ranks, _compare_compressors, cases, {"parallel": parallel}, timeout=300.0):
        assert not problems


@pytest.mark.parametrize("parallel", [BUCKETS, {**BUCKETS, **SHARDED}], ids=["replicated", "sharded"])
def test_sums_in_two_levels_see_the_same_gradients(parallel: dict[str, Any]) -> None:
    """Four replicas on two nodes of two ranks."""
    cases = {"two levels": ["dp-grad=fixpoint,levels=8/4,error-feedback=on"]}
    for problems in run_ranks(4, _compare_compressors, cases, {"parallel": parallel}, env={"LOCAL_WORLD_SIZE": "2"}):
        assert not problems


def _train_recorded(changes: Changes) -> list[Tensor]:
    """The reduced gradients of each step."""
    engines, gradients = tiny_engines(changes), list[Tensor]()
    (buffer,) = engines.buffers
    tiny_train(engines, STEPS, after_step=lambda _: gradients.append(buffer.grads_flat.double()))
    return gradients


def _extrapolate_compressed(cases: dict[str, list[str]], layout: Changes) -> dict[str, tuple[list[float], list[float]]]:
    """Norms of the applied gradients by case, and those of g + 0.75 (g - g_before) of the gradients without a delay.

    Without a learning rate, steps compute the same gradients.
    """
    still: Changes = {"optimizer": {"lr": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}, "model": {"num_layers": 2}}
    norms = {}
    for name, specs in cases.items():
        changes = merge({"compression": {"compress": specs}}, still, layout)
        *gradients, _ = _train_recorded(changes)
        before = [gradients[0], *gradients[:-1]]
        expected = [float((g + 0.75 * (g - old)).norm()) for g, old in zip(gradients, before, strict=True)]
        late = tiny_train(tiny_engines(merge(changes, DELAY, {"parallel": EXTRAPOLATES["parallel"]})), STEPS)
        norms[name] = late.grad_norms[1:], expected
    return norms


def test_compressed_gradients_are_extrapolated() -> None:
    """Without two compressors: ``quantized-adam`` is refused, and ``stable-topk`` overwrites the gradients."""
    cases = {name: COMPRESSORS[name] for name in ON_REPLICAS - {"quantized Adam", "stable-topk"}}
    for norms in run_ranks(2, _extrapolate_compressed, cases, {"parallel": BUCKETS}):
        for name, (applied, expected) in norms.items():
            assert applied == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize("parallel", [{}, SHARDED], ids=["replicated", "sharded"])
def test_gradients_that_are_not_numbers_are_dropped(parallel: dict[str, Any]) -> None:
    """In fp32, in one step; its residuals stay those of the step before."""
    changes: Changes = {"parallel": parallel, "compression": {"compress": ["dp-grad=topk,density=0.5"]}}
    for trace, num_skipped, problems in run_ranks(2, train_with_bad_step, changes, 9, 3, False):
        assert [step for step, norm in enumerate(trace.grad_norms) if math.isnan(norm)] == [0, 4]
        assert all(math.isfinite(loss) for step, loss in enumerate(trace.losses) if step != 3)
        assert trace.losses[-1] < trace.losses[0] - 0.05
        assert num_skipped == 1
        assert not problems


def _evaluated_between(changes: Changes, steps: int) -> tuple[list[float], list[float]]:
    """Losses of training with and without evaluations and saves in between."""

    def evaluate_and_finish(engines: Engines) -> None:
        batches = tiny_batches(engines.config, engines.topology, masked=False, start=1000)
        first = evaluate(engines, batches, 1, 2, 0).losses
        assert engines.delayed is not None
        engines.delayed.settle_states()
        batches = tiny_batches(engines.config, engines.topology, masked=False, start=1000)
        with engines.optimizer.publisher.exact_parameters():
            assert all(torch.equal(shard.main, shard.model) for shard in engines.optimizer.shards)
            total, count = evaluation_step(engines, take_batches(batches, 2, engines.topology.device))[LM_LOSS]
        sums = torch.tensor([total, count], dtype=torch.float64)
        engines.topology.dp.all_reduce(sums).wait()
        assert first[LM_LOSS] == pytest.approx(float(sums[0] / sums[1]), rel=1e-9)

    changes = merge(changes, DELAY, {"parallel": {"delay_correction": "lookahead", **SHARDED}})
    plain = tiny_train(tiny_engines(changes), steps)
    return plain.losses, tiny_train(tiny_engines(changes), steps, after_step=evaluate_and_finish).losses


def test_evaluations_and_saves_do_not_disturb_the_gradients_in_flight() -> None:
    specs: Changes = {"compression": {"compress": ["dp-grad=powersgd,rank=2,min-ratio=0"]}}
    for plain, disturbed in run_ranks(2, _evaluated_between, specs, STEPS):
        assert plain == disturbed


def _advanced_gradients() -> float:
    """Largest difference of the reduced gradients to the sums of the ranks, before the reduction is finished."""
    engines = tiny_engines(merge(DELAY, {"parallel": {"ddp_bucket_size": 3000}}))
    (buffer,), (reducer,) = engines.buffers, engines.sync.reducers
    tiny_train(engines, 1)
    sums = buffer.grads_flat.clone()
    for _ in range(500):
        if reducer.advance():
            break
        time.sleep(0.01)
    else:
        raise AssertionError("no round has advanced")
    torch.distributed.all_reduce(sums)
    return float((buffer.reduced_flat - sums).abs().max())


def test_rounds_advance_between_the_passes() -> None:
    assert max(run_ranks(2, _advanced_gradients)) < 1e-6


def test_a_log_counts_the_rounds_that_a_save_waits_for(prefix: Path, tmp_path: Path) -> None:
    flags = tiny_flags(prefix, delay=1, compress="dp-grad=powersgd,rank=2,min-ratio=0", eval_iters=0, train_iters=3)
    logs = tmp_path / "plain.jsonl", tmp_path / "saved.jsonl"
    saves = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    train(2, [*flags, "--log-json-file", str(logs[0])], [*flags, *saves, "--log-json-file", str(logs[1])])
    sent = [[event["comm"]["dp-grad"]["wire_bytes"] for event in read_events(log)] for log in logs]
    assert len(sent[0]) == 3
    assert sent[0] == sent[1]


def test_weights_are_saved_without_the_look_ahead(tmp_path: Path) -> None:
    changes = merge(DELAY, LOOKS_AHEAD, {"checkpoint": {"save": str(tmp_path), "no_save_optim": True}})
    engines = tiny_engines(changes)
    tiny_train(engines, 3)
    checkpoints = tiny_checkpoints(engines, 3)
    checkpoints.save()
    loaded = tiny_engines({"checkpoint": {"load": str(tmp_path), "finetune": True, "no_load_optim": True}})
    ahead = 0.0
    saved = find_saved(loaded.config.checkpoint, loaded.topology, print)
    assert saved is not None
    tiny_checkpoints(loaded).load(saved)
    for shard, other in zip(engines.optimizer.shards, loaded.optimizer.shards, strict=True):
        assert torch.equal(shard.main, other.model)
        ahead = max(ahead, float((shard.model - other.model).abs().max()))
    assert ahead > 1e-4


def _fp16(parallel: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Norms under a loss scale that overflows at first, losses, and losses under a scale that does not."""
    # An infinite gradient must not enter a residual.
    changes = merge(DELAY, {"parallel": parallel, "compression": {"compress": ["dp-grad=topk,density=0.5"]}})
    high, low = ({"precision": {"fp16": True, "initial_loss_scale": 2.0**n, "hysteresis": 1}} for n in (40, 12))
    first = tiny_train(tiny_engines(merge(changes, high)), 30)
    return first.grad_norms, first.losses, tiny_train(tiny_engines(merge(changes, low)), 1).losses


def _factors(engines: Engines) -> list[Tensor]:
    """Committed factors of PowerSGD, with which its next reduction begins."""
    return [state.export_tensors()["q"].clone() for state in engines.sync.states()]


def _overflow_of_sum() -> list[float]:
    """Norms of a run in which the sum of a finite gradient over two replicas overflows once in fp16."""
    specs = {"compression": {"compress": ["dp-grad=powersgd,rank=2,min-ratio=0"]}}
    engines = tiny_engines(merge(DELAY, specs, {"precision": {"fp16": True, "initial_loss_scale": 2.0**8}}))

    def overflow(engines: Engines) -> None:
        (buffer,) = engines.buffers
        delayed = engines.delayed
        assert delayed is not None
        if delayed.in_flight is not None and delayed.in_flight.iteration == 2:
            before = _factors(engines)
            delayed.finish_reduction()
            buffer.reduced_flat[0] = torch.inf
            delayed.settle_states()
            assert all(map(torch.equal, _factors(engines), before))

    return tiny_train(engines, 7, after_step=overflow).grad_norms


def test_a_sum_that_overflows_is_dropped_with_its_states() -> None:
    for norms in run_ranks(2, _overflow_of_sum):
        assert [math.isfinite(norm) for norm in norms] == [False, True, True, False, True, True, True]


def _masked_losses(changes: Changes) -> list[float]:
    return tiny_run(merge(DOUBLE, DELAY, changes), 4, masked=True).losses


def test_masked_labels_are_counted_beside_gradients_in_flight() -> None:
    layout: Changes = {"parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}}
    expected = _masked_losses({})
    for losses in run_ranks(4, _masked_losses, layout) + run_ranks(2, _masked_losses, {}):
        assert losses == pytest.approx(expected, rel=1e-10)


def _growing_scale(window: int) -> list[float]:
    precision = {"fp16": True, "initial_loss_scale": 2.0**8, "loss_scale_window": window}
    changes = merge(DELAY, SGD, {"precision": precision, "optimizer": {"clip_grad": 0.0}})
    return tiny_train(tiny_engines(changes), 8).losses


def test_gradients_keep_the_loss_scale_that_they_were_computed_with() -> None:
    assert _growing_scale(1) == pytest.approx(_growing_scale(1000), rel=1e-4)


@pytest.mark.parametrize("parallel", [{}, SHARDED], ids=["replicated", "sharded"])
def test_gradients_that_overflow_are_dropped(parallel: dict[str, Any]) -> None:
    """No update before the step after the first step with finite gradients; then one at every step."""
    for norms, losses, (first_loss,) in run_ranks(2, _fp16, parallel):
        updates = [math.isfinite(norm) for norm in norms]
        first_update = updates.index(True)
        assert 10 < first_update < 29
        assert all(updates[first_update:])
        assert losses[0] == pytest.approx(first_loss, rel=1e-3)
        assert losses[-1] < losses[0]
