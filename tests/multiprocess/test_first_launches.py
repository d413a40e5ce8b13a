"""No kernel is launched for the first time beside a pending receive: whole runs on a device that loads kernels late."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.distributed.layout import Layout
from megatron.distributed.topology import build_topology
from megatron.inference.generate import generate, score
from megatron.inference.model import load_model
from megatron.inference.sampling import Sampling
from megatron.training.step import evaluation_step, take_batches, train_step
from tests.support.cases import SharedRanks
from tests.support.combinations import mark_repeats
from tests.support.launches import PretendedDevice, pretended_device
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_batches, tiny_engines
from tests.unit.convert.support import MODELS, saved_model

pytestmark = pytest.mark.multiprocess

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """A run of steps of several kinds.

    Args:
        ranks: that it runs on.
        changes: of the tiny configuration.
        counts: micro-batches of each step.
        evaluations: iterations that are followed by an evaluation.
        scales: loss scales that are set before an iteration.
        epoch: samples until they come again.
        lengths: tokens of a step's samples; all where there are none.
        steady: the last step must overlap: receives are pending while known kernels are launched.
    """

    ranks: int
    changes: Changes
    counts: tuple[int, ...] = (4,) * 6
    evaluations: tuple[int, ...] = (1, 3)
    scales: tuple[tuple[int, float], ...] = ()
    epoch: int | None = None
    lengths: tuple[int, ...] = ()
    steady: bool = True


def _run(*specs: str, pp: int = 2, precision: str | None = None, **parallel: Any) -> Changes:
    changes: Changes = {"parallel": {"pipeline_model_parallel_size": pp, **parallel}}
    if specs:
        changes["compression"] = {"compress": list(specs)}
    if precision is not None:
        changes["precision"] = {precision: True, "initial_loss_scale": 1024.0}
    return changes


VIRTUAL: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": 1}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
LATE = ("pp-forward=fixpoint,bits=8,warmup=2", "pp-backward=lowrank,rank=2,warmup=2,error-feedback=lazy")
UNIFORM = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform"}}
DROPOUT = {"model": {"hidden_dropout": 0.1}}
FIXED: Changes = {"data": {"sample_order": "fixed", "data_path": ["unused"]}}

RUNS: dict[str, Run] = {
    "1f1b": Run(2, _run()),
    "four stages, eager": Run(4, _run(pp=4, pipeline_schedule="eager-1f1b"), counts=(6,) * 6),
    "recomputation and dropout": Run(2, {**_run(), **UNIFORM, **DROPOUT}),
    "codecs after a warm-up": Run(2, _run(*LATE), counts=(4,) * 7),
    "codecs after a warm-up, interleaved": Run(2, _run(*LATE, **VIRTUAL), counts=(4,) * 7),
    "codecs after a warm-up, gpipe": Run(2, _run(*LATE, pipeline_schedule="gpipe"), counts=(4,) * 7),
    "epilogue only, eager": Run(
        2,
        _run("pp-backward=lowrank,rank=2,when=epilogue,warmup=1,error-feedback=lazy", pipeline_schedule="eager-1f1b"),
        counts=(4,) * 6,
    ),
    "bits and ranks that change": Run(
        2,
        _run("pp-forward=fixpoint,bits=8@0/4@2/2@4", "pp-backward=lowrank,rank=6@0/3@3,error-feedback=lazy"),
        counts=(4,) * 8,
    ),
    "compressed in evaluation": Run(2, _run("pp-forward=fixpoint,bits=4,eval=on"), evaluations=(0, 1, 2)),
    "error feedback of each step": Run(2, _run("pp-backward=fixpoint,bits=4,error-feedback=lazy-reset,warmup=1")),
    "samples that come again": Run(
        2, {**_run("pp-forward=delta,bits=4"), **FIXED}, counts=(4,) * 8, epoch=10, steady=False
    ),
    "a batch ramp-up": Run(2, _run(*LATE), counts=(2, 2, 4, 4, 6, 6, 2, 4)),
    "sequences grow": Run(2, _run(**VIRTUAL), lengths=(8, 8, 12, 12, 16, 16), evaluations=(1, 3)),
    "sequences and batches grow, codecs": Run(
        2, _run(*LATE), counts=(2, 2, 2, 4, 4, 4, 4, 4, 4), lengths=(8, 8, 8, 8, 12, 12, 16, 16, 16)
    ),
    "sequences grow, samples come again": Run(
        2,
        {**_run("pp-forward=delta,bits=4"), **FIXED},
        counts=(4,) * 8,
        epoch=8,
        lengths=(8, 8, 8, 12, 12, 16, 16, 16),
        steady=False,
    ),
    "sequences grow, tensor-parallel codecs": Run(
        4,
        _run("tp-forward=fixpoint,warmup=1", tensor_model_parallel_size=2, sequence_parallel=True),
        lengths=(8, 8, 8, 12, 12, 12),
        evaluations=(1,),
    ),
    "an overflow": Run(
        2,
        _run("pp-backward=lowrank,rank=2,error-feedback=lazy", precision="fp16"),
        counts=(4,) * 7,
        scales=((0, 1.0), (3, 2.0**60), (4, 1.0), (5, 2.0)),
    ),
    "tensor-parallel, sequence-parallel": Run(
        4, _run("tp-forward=fixpoint,warmup=3", tensor_model_parallel_size=2, sequence_parallel=True), counts=(4,) * 6
    ),
    "gradients summed during backward": Run(
        4,
        _run("dp-grad=powersgd,rank=2,warmup=2", **OVERLAP, **VIRTUAL),
        counts=(4,) * 7,
    ),
    "stable top-k during backward": Run(
        4, _run("dp-grad=stable-topk,density=0.3,interval=3", **OVERLAP, **VIRTUAL), counts=(4,) * 11
    ),
    "errors are probed": Run(2, {**_run(*LATE), "logging": {"check_orth_error_acti": True}}, counts=(4,) * 6),
}


def _steps(run: Run, device: PretendedDevice | None) -> tuple[list[float], list[int]]:
    """Losses of the training steps, and how many receives were pending beside a launch in each."""
    engines = tiny_engines(run.changes)
    batches = tiny_batches(engines.config, engines.topology, masked=False, epoch=run.epoch)
    losses, ahead = [], []
    for iteration, count in enumerate(run.counts):
        for at, scale in run.scales:
            if at == iteration:
                engines.optimizer.loss_scale.scale = scale  # type: ignore[misc]
        if device is not None:
            device.begin(f"iteration {iteration}")
        length = run.lengths[iteration] if run.lengths else None
        step_batches = take_batches(batches, count, engines.topology.device, length)
        losses.append(train_step(engines, step_batches, iteration, 1e-3, 0.0, seq_length=length).loss)
        ahead.append(device.ahead if device is not None else 0)
        for observer in engines.ledger.observers:
            list(observer.findings(iteration + 1))
        if iteration in run.evaluations:
            if device is not None:
                device.begin(f"evaluation after iteration {iteration}")
            evaluation_step(engines, take_batches(batches, 2, engines.topology.device))
    return losses, ahead


def _rank(run: Run) -> tuple[list[float], list[float], list[str], list[int]]:
    expected, _ = _steps(run, None)
    with pretended_device() as device:
        losses, ahead = _steps(run, device)
    return expected, losses, device.violations, ahead


ON_RANKS = SharedRanks(_rank, {name: (run.ranks, (run,)) for name, run in RUNS.items()})


# Each kind of step whose kernels come late: of a schedule, a recomputation, a codec after its warm-up or with other
# bits, a longer sequence, a larger batch, an evaluation, a skipped step, a probe, a sum of gradients during backward.
KEPT = (
    "four stages, eager",
    "recomputation and dropout",
    "codecs after a warm-up, interleaved",
    "epilogue only, eager",
    "bits and ranks that change",
    "compressed in evaluation",
    "sequences and batches grow, codecs",
    "sequences grow, samples come again",
    "sequences grow, tensor-parallel codecs",
    "an overflow",
    "gradients summed during backward",
    "errors are probed",
)


@pytest.mark.parametrize("name", mark_repeats(RUNS, keep=KEPT))
def test_nothing_is_loaded_beside_a_pending_receive(request: pytest.FixtureRequest, name: str) -> None:
    """And the steady state still has receives pending beside its launches."""
    run = RUNS[name]
    for rank, (expected, losses, violations, ahead) in enumerate(ON_RANKS.results(request, name)):
        assert violations == [], f"rank {rank}: {len(violations)}, first {violations[0]}"
        assert losses == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
        assert ahead[-1] > 0 or not run.steady, f"rank {rank}: pending in each step {ahead}"


def _generate(root: Path) -> list[str]:
    topology = build_topology(Layout(pp=2), torch.device("cpu"))
    with pretended_device() as device:
        model = load_model(root, topology=topology)
        device.begin("generation")
        texts = generate(model, [[3, 8, 13], [5]], 6, Sampling(top_p=0.9), [1, 2])
        device.begin("scores")
        score(model, [sample.tokens for sample in texts])
    return device.violations


def test_generation_on_stages_loads_nothing_beside_a_pending_receive(tmp_path: Path) -> None:
    saved = saved_model(tmp_path, MODELS["gpt2"], layers=4)
    assert run_ranks(2, _generate, saved, timeout=300.0) == [[]] * 2
