"""``--no-pipeline-flush``: a pipeline that stays full takes the same steps, to the bit, as one that is flushed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.steps import BatchSizeSchedule, LengthSchedule, StepSizes
from megatron.models.losses import StageLoss
from megatron.parallel.pipeline.channel import Message
from megatron.parallel.pipeline.schedule import ScheduleLimits, make_schedule
from megatron.training.assembly import Engines
from megatron.training.evaluation import evaluate
from megatron.training.flushless import flush_pipeline
from megatron.training.replica_check import disagreements
from megatron.training.step import take_batches, train_step
from megatron.training.timers import Timers
from tests.multiprocess.test_layouts import OF_DEBERTA
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.spawn import run_ranks
from tests.support.tiny import T5, Trace, merge, tiny_batches, tiny_engines, tiny_train
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]

PP2: Changes = {"parallel": {"pipeline_model_parallel_size": 2}, "model": {"num_layers": 2}}
EAGER: Changes = {"parallel": {"pipeline_schedule": "eager-1f1b"}}
RECOMPUTES: Changes = {"recompute": {"recompute_granularity": "full"}}
NO_FLUSH: Changes = {"parallel": {"no_pipeline_flush": True}}
DELAY: Changes = {"parallel": {"delay": 1}, "data": {"sample_order": "fixed"}}
EAGER_NO_FLUSH = merge(PP2, EAGER, NO_FLUSH)


def _codecs(*specs: str) -> Changes:
    return {"compression": {"compress": list(specs)}}


CASES: dict[str, Changes] = {
    "tied embedding, dropout": {"model": {"hidden_dropout": 0.1}},
    "eager": EAGER,
    "a single micro-batch": {"training": {"micro_batch_size": 4}},
    "bf16, recomputed": merge({"precision": {"bf16": True}}, RECOMPUTES),
    "bits": _codecs("pp-forward=fixpoint,bits=4,rounding=stochastic", "pp-backward=fixpoint,bits=8"),
    "delta": merge(EAGER, _codecs("pp-forward=delta,bits=4,cache=6", "pp-backward=fixpoint,bits=8")),
    "residuals": _codecs("pp-forward=lowrank,rank=2", "pp-backward=lowrank,rank=2,error-feedback=on"),
    "residuals of a step": _codecs("pp-backward=lowrank,rank=2,error-feedback=lazy-reset"),
    "warm-up": _codecs("pp-forward=fixpoint,bits=4,warmup=2", "pp-backward=fixpoint,bits=8@0/4@3"),
    "bits grow": _codecs("pp-forward=fixpoint,bits=4@0/8@3", "pp-backward=fixpoint,bits=4@0/8@3"),
    "T5": T5,
}
OF_FOUR: dict[str, Changes] = {
    "four stages": {"parallel": {"pipeline_model_parallel_size": 4}, "training": {"global_batch_size": 8}},
    "four eager stages, few micro-batches": merge(EAGER, {"parallel": {"pipeline_model_parallel_size": 4}}),
    "four eager stages, as many as possible in flight": merge(
        EAGER,
        {
            "parallel": {"pipeline_model_parallel_size": 4, "pipeline_max_in_flight": 12},
            "training": {"global_batch_size": 8},
        },
        _codecs("pp-forward=delta,bits=4,cache=12", "pp-backward=lowrank,rank=2,error-feedback=on"),
    ),
    "replicas": merge(PP2, _codecs("dp-grad=powersgd,rank=2,min-ratio=0", "embedding=stable-topk,density=0.2")),
    "sharded, looking ahead": merge(
        PP2, {"parallel": {"use_distributed_optimizer": True, "delay_correction": "lookahead"}}
    ),
    "sharded, with gathers of other bits": merge(
        PP2,
        {"parallel": {"use_distributed_optimizer": True}},
        _codecs("param-gather=fixpoint,bits=8@0/4@3"),
    ),
    "tensor-parallel, recomputed": merge(
        PP2,
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
        RECOMPUTES,
        _codecs("tp-forward=fixpoint,bits=6@0/4@3,rounding=stochastic,warmup=2"),
    ),
}


def _train(changes: Changes, masked: bool, steps: int, grows: bool) -> tuple[Trace, list[str]]:
    engines = tiny_engines(merge(changes, {"data": {"eod_mask_loss": masked}}))
    batches = BatchSizeSchedule(8, micro_batch_size=1, dp_size=engines.topology.dp.size, rampup=(4, 4, 16))
    sizes = StepSizes(batches, LengthSchedule((8, 12, 16), (0, 2, 3))) if grows else None
    trace = tiny_train(engines, steps, masked, epoch=12, sizes=sizes)
    assert engines.delayed is not None
    engines.delayed.finish_reduction()
    return trace, disagreements(engines)


def _compare(cases: dict[str, Changes], steps: int) -> dict[str, tuple[Trace, Trace, list[str]]]:
    """Traces with and without a flush, and problems of the replicas, by case."""
    results = {}
    for name, changes in cases.items():
        masked = name == "T5" or changes.get("data", {}).get("eod_mask_loss", False)
        grows = name == "batches and sequences grow"
        flushed, _ = _train(merge(changes, DELAY), masked, steps, grows)
        trace, problems = _train(merge(changes, DELAY, NO_FLUSH), masked, steps, grows)
        results[name] = flushed, trace, problems
    return results


OF_ANY: dict[str, Changes] = {
    "masked labels": merge(PP2, {"data": {"eod_mask_loss": True}}),
    "batches and sequences grow": merge(PP2, EAGER, {"training": {"global_batch_size": 8}}),
}
COMPARED: dict[int, dict[str, Changes]] = {
    2: {name: merge(PP2, case) for name, case in CASES.items()} | OF_ANY,
    4: OF_FOUR | OF_ANY,
}
REPEATS = {2: ("eager", "bits grow"), 4: ("four eager stages, few micro-batches", *OF_ANY)}
"""Other cases are eager and change their bits; two ranks mask labels and grow."""


@pytest.mark.parametrize(
    ("ranks", "repeated"), mark_repeats(product(COMPARED, (False, True)), [(2, False), (4, False)])
)
def test_steps_equal_those_with_a_flush(ranks: int, repeated: bool) -> None:
    cases = {name: case for name, case in COMPARED[ranks].items() if (name in REPEATS[ranks]) is repeated}
    for result in run_ranks(ranks, _compare, cases, 5, timeout=300.0):
        for name, (flushed, trace, problems) in result.items():
            assert trace.losses == flushed.losses, name
            assert trace.grad_norms[1:] == flushed.grad_norms[1:], name
            assert math.isnan(trace.grad_norms[0])
            # Ranks agree on losses and on updates at different times.
            sent, sent_with_flush = ({**t.bytes_by_point, "control": 0} for t in (trace, flushed))
            assert sent == sent_with_flush, name
            assert not problems


def _losses_of_deberta(changes: Changes, steps: int) -> list[float]:
    return tiny_train(tiny_engines(merge(OF_DEBERTA, PP2, DELAY, changes)), steps).losses


def test_deberta_equals_a_run_with_a_flush_up_to_rounding() -> None:
    """In fp64. Its projections of distances have gradients of backward and of weight passes, whose order changes."""
    flushed, losses = (run_ranks(2, _losses_of_deberta, changes, 5) for changes in ({}, NO_FLUSH))
    for rank in range(2):
        assert len(losses[rank]) == 5
        assert losses[rank] == pytest.approx(flushed[rank], rel=1e-10)


def _passes(changes: Changes, steps: int) -> list[tuple[int, int]]:
    """Iterations and micro-batches of this rank's passes, in order."""
    engines = tiny_engines(merge(changes, DELAY, NO_FLUSH))
    begin_pass, passes = engines.pipeline.begin_pass, list[tuple[int, int]]()

    def record(iteration: int, micro_batch: int) -> None:
        passes.append((iteration, micro_batch))
        begin_pass(iteration, micro_batch)

    engines.pipeline.begin_pass = record
    tiny_train(engines, steps)
    return passes


@pytest.mark.parametrize(
    ("kind", "count", "in_flight", "in_long_step"),
    [("1f1b", 8, None, None), ("eager-1f1b", 8, None, None), ("eager-1f1b", 8, 8, 8), ("eager-1f1b", 4, 8, 5)],
)
def test_steps_have_the_order_of_one_long_step(
    kind: str, count: int, in_flight: int | None, in_long_step: int | None
) -> None:
    """In which at most one micro-batch more than a step has is in flight."""
    parallel = {"pipeline_model_parallel_size": 4, "pipeline_schedule": kind, "pipeline_max_in_flight": in_flight}
    changes: Changes = {"parallel": parallel, "training": {"global_batch_size": count}}
    steps = 3
    results = run_ranks(4, _passes, changes, steps)
    for stage, passes in enumerate(results):
        ops = make_schedule(kind, 4, stage, 1, steps * count, ScheduleLimits(in_long_step))
        assert passes == [divmod(op.micro_batch, count) for op in ops]


def _sent_and_weights(tp: int, steps: int) -> list[tuple[str, int]]:
    """Backward messages that this rank sends and weight passes that it runs, in order, with their micro-batches."""
    parallel = {"pipeline_model_parallel_size": 4 // tp, "tensor_model_parallel_size": tp}
    engines = tiny_engines(merge(EAGER, DELAY, NO_FLUSH, {"parallel": parallel, "model": {"num_layers": 4}}))
    channel, weight_grads, events = engines.channel, engines.pipeline.weight_grads, list[tuple[str, int]]()
    assert channel is not None
    send, compute = channel.send, weight_grads.compute

    def record_send(message: Message, x: torch.Tensor) -> None:
        send(message, x)
        if message.direction is channel.backward:
            events.append(("sent", message.position.micro_batch))

    def record_weights(slot: tuple[int, int]) -> None:
        assert any(True for _ in weight_grads.tensors(slot))
        compute(slot)
        events.append(("weights", slot[1]))

    channel.send, weight_grads.compute = record_send, record_weights  # type: ignore[method-assign, assignment]
    tiny_train(engines, steps)
    flush_pipeline(engines, Timers())
    return events


@pytest.mark.parametrize("tp", [1, 2])
def test_weight_gradients_follow_the_message_to_the_previous_stage(tp: int) -> None:
    """Of the same micro-batch. The first stage sends none, and tensor-parallel ranks compute both at once."""
    steps, count = 3, 4
    for rank, events in enumerate(run_ranks(4, _sent_and_weights, tp, steps)):
        stage, kinds = rank // tp, ("sent", "weights") if tp == 1 else ("sent",)
        assert events == [(kind, m) for _ in range(steps) for m in range(count) for kind in kinds if stage > 0]


def _evaluated_between(steps: int) -> tuple[list[float], list[float]]:
    """Losses with and without flushes and evaluations between some of the steps."""
    num_steps = 0

    def evaluate_sometimes(engines: Engines) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (2, 3, 5):
            flush_pipeline(engines, Timers())
            batches = tiny_batches(engines.config, engines.topology, masked=False, start=1000)
            evaluate(engines, batches, 1, 2, 0)

    changes = merge(PP2, DELAY, NO_FLUSH, _codecs("pp-forward=delta,bits=4", "pp-backward=lowrank,rank=2"))
    plain = tiny_train(tiny_engines(changes), steps)
    return plain.losses, tiny_train(tiny_engines(changes), steps, after_step=evaluate_sometimes).losses


def test_evaluations_between_steps_change_nothing() -> None:
    for plain, disturbed in run_ranks(2, _evaluated_between, 7):
        assert plain == disturbed


def _mailboxes() -> list[int]:
    """Buffers of mailboxes after each of two steps, and after the flush that follows it."""
    engines = tiny_engines(merge(PP2, EAGER, DELAY, NO_FLUSH))
    assert engines.channel is not None
    channel, counts = engines.channel, list[int]()

    def count(engines: Engines) -> None:
        counts.append(channel.mailbox_buffers)
        flush_pipeline(engines, Timers())
        counts.append(channel.mailbox_buffers)

    tiny_train(engines, 2, after_step=count)
    return counts


def test_mailboxes_are_open_between_steps_until_a_flush() -> None:
    """With a buffer for each micro-batch that may be in flight."""
    assert run_ranks(2, _mailboxes) == [[3, 0, 3, 0]] * 2


def train_with_bad_step(changes: Changes, steps: int, bad: int, flushes: bool) -> tuple[Trace, int, list[str]]:
    """A run in which the loss of step ``bad`` is not a number, and with ``flushes`` a flush follows that step."""
    engines = tiny_engines(merge(DELAY, changes))
    stage, num_steps = engines.stages[-1], 0
    loss = stage.loss

    def spoil(*args: Any) -> StageLoss:
        result = loss(*args)
        return replace(result, objective=result.objective * torch.nan) if num_steps == bad else result

    def count(engines: Engines) -> None:
        nonlocal num_steps
        if flushes and num_steps == bad:
            flush_pipeline(engines, Timers())
        num_steps += 1

    stage.loss = spoil  # type: ignore[assignment, method-assign]
    trace = tiny_train(engines, steps, epoch=12, after_step=count)
    return trace, engines.plan.steps.skipped, disagreements(engines)


@pytest.mark.parametrize(
    ("ranks", "specs", "dropped"),
    [
        (2, [], [3]),
        (2, ["pp-forward=delta,bits=4", "pp-backward=lowrank,rank=2"], [3, 4]),
        (4, ["dp-grad=topk,density=0.5"], [3]),
    ],
    ids=["exact", "codecs", "residuals of replicas"],
)
def test_gradients_that_are_not_finite_are_dropped(ranks: int, specs: list[str], dropped: list[int]) -> None:
    """Also those of the next step, whose messages have passed codecs that remember them; then codecs begin anew."""
    for trace, num_skipped, problems in run_ranks(
        ranks, train_with_bad_step, merge(EAGER_NO_FLUSH, _codecs(*specs)), 9, 3, False
    ):
        without_update = [0, *(step + 1 for step in dropped)]
        assert [step for step, norm in enumerate(trace.grad_norms) if math.isnan(norm)] == without_update
        assert all(map(math.isfinite, trace.losses))
        assert trace.losses[-1] < trace.losses[0] - 0.05
        assert num_skipped == len(dropped)
        assert not problems


def _train_with_bad_activations(steps: int, bad: int) -> list[float]:
    """Norms of a run in which the first stage's output is not a number in step ``bad``."""
    codecs = _codecs("pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8")
    engines, num_steps = tiny_engines(merge(DELAY, EAGER_NO_FLUSH, codecs)), 0

    def spoil(stage: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return output * torch.nan if num_steps == bad and engines.pipeline.stage == 0 else output

    def count(engines: Engines) -> None:
        nonlocal num_steps
        num_steps += 1

    engines.stages[0].register_forward_hook(spoil)
    return tiny_train(engines, steps, epoch=12, after_step=count).grad_norms


def test_codecs_of_samples_begin_anew() -> None:
    """Samples of the bad step come back three steps later; the next step has others, and its gradients are finite."""
    for norms in run_ranks(2, _train_with_bad_activations, 9, 3):
        assert [step for step, norm in enumerate(norms) if math.isnan(norm)] == [0, 4]


def test_codecs_begin_anew_where_a_flush_finds_gradients_that_are_not_finite() -> None:
    """A checkpoint of this moment must not hold such values, and the next step's messages do not meet them."""
    changes = merge(EAGER_NO_FLUSH, _codecs("pp-forward=delta,bits=4", "pp-backward=lowrank,rank=2"))
    for trace, num_skipped, problems in run_ranks(2, train_with_bad_step, changes, 9, 3, True):
        assert [step for step, norm in enumerate(trace.grad_norms) if math.isnan(norm)] == [0, 4]
        assert trace.losses[-1] < trace.losses[0] - 0.05
        assert num_skipped == 1
        assert not problems


def _without_labels(changes: Changes, steps: int, empty: int) -> tuple[list[float], list[float | None]]:
    """Losses and norms of a run in which no label counts in step ``empty``."""
    engines = tiny_engines(merge(PP2, DELAY, {"data": {"eod_mask_loss": True}}, changes))
    batches, outcomes = tiny_batches(engines.config, engines.topology, masked=True), []
    for step in range(steps):
        step_batches = take_batches(batches, 4 // engines.topology.dp.size, engines.topology.device)
        for batch in step_batches if step == empty else ():
            assert batch.loss_mask_bs is not None
            batch.loss_mask_bs.zero_()
        outcomes.append(train_step(engines, step_batches, step, lr=3e-3, weight_decay=0.1))
    flush_pipeline(engines, Timers())
    return [outcome.loss for outcome in outcomes], [outcome.grad_norm for outcome in outcomes]


@pytest.mark.parametrize(("ranks", "specs"), [(2, []), (4, ["dp-grad=topk,density=0.5"])], ids=["exact", "residuals"])
def test_a_step_without_labels_is_not_applied(ranks: int, specs: list[str]) -> None:
    codecs = _codecs(*specs)
    flushed, results = (run_ranks(ranks, _without_labels, merge(codecs, changes), 7, 3) for changes in ({}, NO_FLUSH))
    assert results == flushed
    for _, norms in results:
        assert [step for step, norm in enumerate(norms) if norm is None] == [0, 4]


def _fp16(changes: Changes, exponent: int, window: int) -> tuple[Trace, list[float]]:
    """A run whose loss scale is too large at first, and grows after ``window`` steps; and its scale after each step."""
    precision = {"fp16": True, "initial_loss_scale": 2.0**exponent, "hysteresis": 1, "loss_scale_window": window}
    specs, scales = _codecs("pp-forward=fixpoint,bits=8", "pp-backward=lowrank,rank=4"), list[float]()
    engines = tiny_engines(merge(PP2, EAGER, DELAY, specs, changes, {"precision": precision}))
    trace = tiny_train(engines, 30, after_step=lambda engines: scales.append(engines.optimizer.loss_scale.scale))
    return trace, scales


@pytest.mark.parametrize(("exponent", "window"), mark_repeats([(24, 1000), (20, 3)], keep=[(20, 3)]))
def test_a_loss_scale_that_is_too_large_falls_until_gradients_are_finite(exponent: int, window: int) -> None:
    """And no further than with a flush, though the step after an overflow has the old scale, too."""
    flushed, flushed_scales = run_ranks(2, _fp16, {}, exponent, window)[0]
    first_flushed = next(step for step, norm in enumerate(flushed.grad_norms) if math.isfinite(norm))
    for trace, scales in run_ranks(2, _fp16, NO_FLUSH, exponent, window):
        updates = [math.isfinite(norm) for norm in trace.grad_norms]
        first = updates.index(True)
        assert 3 < first < 20
        assert scales[first] == flushed_scales[first_flushed]
        assert all(map(math.isfinite, trace.losses))
        assert sum(updates[first:]) > (30 - first) / 2
        assert trace.losses[-1] < trace.losses[0] - 0.05
        # Norms are those of gradients without the scale.
        assert max(norm for norm in trace.grad_norms if math.isfinite(norm)) < 10


def _growing_scale(changes: Changes, window: int) -> list[float]:
    """Losses of a run whose loss scale doubles every ``window`` steps, with a residual of its messages."""
    precision = {"fp16": True, "initial_loss_scale": 2.0**6, "loss_scale_window": window}
    sgd = {"optimizer": "sgd", "sgd_momentum": 0.9, "lr": 0.1, "clip_grad": 0.0}
    specs = _codecs("pp-backward=lowrank,rank=1,error-feedback=on")
    return tiny_train(
        tiny_engines(merge(PP2, DELAY, changes, specs, {"precision": precision, "optimizer": sgd})), 9
    ).losses


@pytest.mark.parametrize("changes", [{}, NO_FLUSH], ids=["flush", "no flush"])
def test_residuals_of_messages_have_no_loss_scale(changes: Changes) -> None:
    growing, constant = (run_ranks(2, _growing_scale, changes, window)[0] for window in (1, 1000))
    assert growing == pytest.approx(constant, rel=1e-4)


def _events(log: Path) -> list[dict[str, Any]]:
    """Training steps and evaluations in a log, without what depends on time."""
    names = ("kind", "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "skipped_iterations")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [{name: e.get(name) for name in names} for e in events if e["kind"] in ("train", "validation")]


def test_a_run_logs_the_same(prefix: Path, tmp_path: Path) -> None:
    """Each step and evaluation once and in order, with the rates and samples of the step itself. No flush is due
    between iteration 5 and the one that is left out."""
    logs, runs = [], []
    for flushes in (True, False):
        log, saved = tmp_path / f"{flushes}.jsonl", tmp_path / f"saved-{flushes}"
        logs.append(log)
        runs.append(
            tiny_flags(
                prefix,
                pipeline_model_parallel_size=2,
                delay=1,
                no_pipeline_flush=not flushes,
                train_iters=9,
                eval_interval=4,
                check_replicas=4,
                iterations_to_skip="6",
                lr_decay_style="cosine",
                save=saved,
                save_interval=4,
                log_json_file=log,
            )
        )
    train(2, *runs)
    with_flush, without_flush = map(_events, logs)
    assert [event["iteration"] for event in with_flush if event["kind"] == "train"] == [1, 2, 3, 4, 5, 7, 8, 9]
    assert without_flush == with_flush
