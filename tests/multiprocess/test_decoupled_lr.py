"""Runs with a separate learning rate for embeddings and output layer, against a plain loop with two groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.optimizer.optimizer import Optimizer, StepTotals
from megatron.optimizer.step_summary import StepSummary, StopVotes
from megatron.training.step import take_batches, train_step
from tests.support.corpus import tiny_flags
from tests.support.events import read_events
from tests.support.spawn import RankFailure, run_ranks
from tests.support.tiny import merge, tiny_batches, tiny_engines
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

LR, DECOUPLED, DECAY, CLIP = 3e-3, 2e-2, 0.1, 0.5
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
Sections = Mapping[str, Mapping[str, Any]]


class _PlainAdam:
    """torch's AdamW with two learning rates, in the place of an optimizer: nothing is sharded, reduced, or fused."""

    def __init__(self, replaced: Optimizer) -> None:
        slots = [slot for buffer in replaced.buffers for bucket in buffer.buckets for slot in bucket.slots]
        self._grads = {
            slot.param: buffer.grads_flat[slot.start : slot.stop].view(slot.param.shape)
            for buffer in replaced.buffers
            for bucket in buffer.buckets
            for slot in bucket.slots
        }
        names = {slot.param: slot.logical_name for slot in slots}
        groups: list[dict[str, Any]] = [
            {"params": [p for p, n in names.items() if n in VOCABULARY], "lr": DECOUPLED, "weight_decay": DECAY},
            {"params": [p for p, n in names.items() if n not in VOCABULARY and p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in names if p.dim() == 1], "weight_decay": 0.0},
        ]
        self._inner = torch.optim.AdamW(groups, lr=LR, foreach=False)
        self.loss_scale, self.sharded = replaced.loss_scale, False

    def summarize(self, completed: StepSummary, *_: object) -> StepSummary:
        return completed

    def step(self, summary: StepSummary, *_: object, **__: object) -> StepTotals:
        for param, grad in self._grads.items():
            param.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(list(self._grads), CLIP)
        self._inner.step()
        for param in self._grads:
            param.grad = None
        means, counted, grad_sq = summary.mean_losses, summary.counted, float(norm) ** 2
        return StepTotals(means, counted, grad_sq, None, None, StopVotes(), 1.0, grad_norm=float(norm))


def _losses(changes: Sections, plain: bool = False) -> list[float]:
    engines = tiny_engines(merge({"precision": {"fp64": True}, "optimizer": {"clip_grad": CLIP}}, changes))
    if plain:
        engines = replace(engines, optimizer=_PlainAdam(engines.optimizer))  # type: ignore[arg-type]
    config, layout = engines.config, engines.topology.layout
    batches = tiny_batches(config, engines.topology, masked=False)
    count = config.training.global_batch_size // (config.training.micro_batch_size * layout.dp)
    losses = []
    for iteration in range(6):
        step_batches = take_batches(batches, count, engines.topology.device)
        losses.append(train_step(engines, step_batches, iteration, LR, DECAY, DECOUPLED).loss)
    return losses


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2 with the distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2 pp2 with sequence parallelism": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
}


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_losses_are_those_of_a_plain_loop_on_any_layout(untied: bool) -> None:
    model = {"model": {"untie_embeddings_and_output_weights": untied}}
    expected = _losses(model, plain=True)
    layouts = LAYOUTS if not untied else {name: LAYOUTS[name] for name in list(LAYOUTS)[1:3]}
    for ranks, parallel in layouts.values():
        for losses in run_ranks(ranks, _losses, {**model, "parallel": parallel}):
            assert losses == pytest.approx(expected, rel=1e-12)


def _trained(path: Path) -> dict[int, dict[str, Any]]:
    return {event["iteration"]: event for event in read_events(path)}


SCHEDULE: dict[str, Any] = {
    "train_iters": 8,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "decoupled_lr": 1e-2,
    "decoupled_min_lr": 2e-3,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 2,
    "lr_decay_iters": 6,
}
RATES = [0.0, 5e-3, 1e-2, 8e-3, 6e-3, 4e-3, 2e-3, 2e-3]
"""Of the embeddings: by hand, from the two ends and the two lengths."""


def test_a_run_logs_its_rate_and_resumes_exactly(prefix: Path, tmp_path: Path) -> None:
    uninterrupted, resumed_log, saved = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", tmp_path / "saved"
    text, curves = tmp_path / "log.txt", tmp_path / "curves"
    common = {**SCHEDULE, "use_distributed_optimizer": True, "bf16": True}
    train(2, tiny_flags(prefix, **common, log_json_file=uninterrupted, log_txt_file=text, tensorboard_dir=curves))
    for stop in (4, None):
        train(2, tiny_flags(prefix, **common, save=saved, load=saved, exit_interval=stop, log_json_file=resumed_log))
    events, resumed = _trained(uninterrupted), _trained(resumed_log)
    assert [events[n]["decoupled_learning_rate"] for n in range(1, 9)] == pytest.approx(RATES, rel=1e-12)
    for name in ("lm_loss", "grad_norm", "learning_rate", "decoupled_learning_rate"):
        assert [event[name] for event in resumed.values()] == [event[name] for event in events.values()]
    lines = [line for line in text.read_text().splitlines() if line.startswith(" iteration")]
    for line, rate in zip(lines, RATES, strict=True):
        assert line.endswith(f"| decoupled learning rate: {rate:.3E} |")
    assert _curve(curves, "decoupled-learning-rate") == pytest.approx(RATES, rel=1e-6)
    with pytest.raises(RankFailure, match=r"--decoupled-lr: decoupled_lr is 0\.02 on the command line and 0\.01 in"):
        train(2, tiny_flags(prefix, **{**common, "train_iters": 9, "decoupled_lr": 2e-2}, load=saved))


def _curve(folder: Path, tag: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return [event.value for event in read.Scalars(tag)]
