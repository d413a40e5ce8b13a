"""The frozen pipeline: its exact gradients are the model's, and its errors those of the codecs alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lep.figure import draw_losses
from benchmarks.lep.frozen import KINDS, FrozenPipeline
from benchmarks.lep.run import losses_of, trained_log
from megatron.data.batch import Batch
from megatron.distributed.topology import single_process
from megatron.models.context import ForwardContext
from megatron.models.gpt import GPTStage
from megatron.parallel.tensor.random import DropoutKeys
from tests.support.tiny import tiny_batches, tiny_config, tiny_gpt

MICRO_BATCHES, SEED = 6, 5
CHANGES: dict[str, dict[str, Any]] = {
    "precision": {"fp64": True},
    "model": {"hidden_dropout": 0.1},
    "training": {"global_batch_size": MICRO_BATCHES},
}


def _model() -> GPTStage:
    stage = tiny_gpt(CHANGES).train()
    for param in stage.parameters():
        param.grad = None
    return stage


def _batches(count: int) -> list[Batch]:
    return list(itertools.islice(tiny_batches(tiny_config(CHANGES, 1), single_process(), False), count))


def _gradients(batches: list[Batch]) -> dict[str, torch.Tensor]:
    """By the whole model, in one backward pass for each micro-batch."""
    stage = tiny_gpt(CHANGES).train()
    names = {f"{n}.{p}": q for n, layer in stage.layers.items() for p, q in layer.named_parameters()}
    sums = {name: torch.zeros_like(param) for name, param in names.items()}
    for batch in batches:
        assert batch.tokens_bs is not None
        assert batch.labels_bs is not None
        assert batch.loss_mask_bs is not None
        out = stage(batch.tokens_bs, ForwardContext(dropout=DropoutKeys(SEED, tuple(batch.draw_ids_b.tolist()))))
        total, _ = stage.token_losses(out, batch.labels_bs, batch.loss_mask_bs / batch.loss_mask_bs.numel())
        for name, grad in zip(names, torch.autograd.grad(total / len(batches), list(names.values())), strict=True):
            sums[name] += grad
    return sums


def test_exact_gradients_are_the_models_and_a_full_rank_leaves_no_error() -> None:
    batches = _batches(MICRO_BATCHES)
    pipeline = FrozenPipeline(_model(), 4, 1000, MICRO_BATCHES, SEED)
    errors = pipeline.iteration(batches)
    wanted = _gradients(batches)
    assert pipeline.exact.keys() == wanted.keys()
    for name, grad in pipeline.exact.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=1e-12)
    for kind in KINDS:
        assert errors[kind]["matrices"] < 1e-10
        assert errors[kind]["vectors"] < 1e-10


@pytest.mark.parametrize("late_only", [True, False])
def test_only_stages_behind_a_compressed_message_are_wrong(late_only: bool) -> None:
    pipeline = FrozenPipeline(_model(), 4, 2, MICRO_BATCHES, SEED, late_only)
    assert [len(sent) for sent in pipeline.compressed] == ([4, 3, 2, 1] if late_only else [MICRO_BATCHES] * 4)
    batches = iter(_batches(3 * MICRO_BATCHES))
    found = [pipeline.iteration([next(batches) for _ in range(MICRO_BATCHES)]) for _ in range(3)]
    for method in pipeline.methods:
        layers = {name.split(".")[0] for name in method.error}
        assert layers == {"0", "1", "2"}
        assert 0.0 < found[-1][method.kind]["matrices"] < 1.5
    # What an iteration begins with is the same for all but those that carry something over from the last one.
    assert found[0]["none"] != found[0]["lazy"]
    assert found[1]["lazy"] != found[1]["lazy-reset"]
    assert found[0]["lazy"] == found[0]["lazy-reset"]
    assert pipeline.methods[0].ratios == []
    assert 0.0 < pipeline.kappas.means()["query_key_value"] < 1.0


def test_lazy_errors_cancel_in_the_sum_of_what_was_sent() -> None:
    """A constant gradient: with feedback the mean error falls with the number of messages, without it stays."""
    pipeline = FrozenPipeline(_model(), 4, 2, MICRO_BATCHES, None, late_only=False)
    batches = _batches(1) * MICRO_BATCHES
    for _ in range(6):
        pipeline.iteration(batches)
    means = pipeline.means()
    assert means["lazy"]["matrices"] < 0.3 * means["none"]["matrices"]


def test_the_losses_of_complete_runs_are_drawn(tmp_path: Path) -> None:
    for kind, seeds in (("dense", (1, 2)), ("lazy", (1,))):
        for seed in seeds:
            log = trained_log(tmp_path, 64, kind, seed)
            log.parent.mkdir(exist_ok=True)
            lines = [{"kind": "train", "iteration": step, "lm_loss": 5.0 - step / 10 + seed} for step in (10, 20)]
            lines.append({"kind": "test", "iteration": 20, "lm_loss": 3.0})
            log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    unfinished = trained_log(tmp_path, 64, "lazy", 2)
    unfinished.write_text(json.dumps({"kind": "train", "iteration": 10, "lm_loss": 9.0}) + "\n")
    losses = losses_of(tmp_path, 64, (1, 2, 3))
    assert losses == {"dense": [{10: 5.0, 20: 4.0}, {10: 6.0, 20: 5.0}], "lazy": [{10: 5.0, 20: 4.0}]}
    assert draw_losses(losses, tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG"
