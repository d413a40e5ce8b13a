"""Stopping and going on: to the last digit at the same layout, to rounding at another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.documented import python_blocks
from tests.support.events import read_events, read_losses
from tests.support.reseal import reseal
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

SCRIPT = "pretrain_gpt.py"

unevaluated = partial(tiny_flags, eval_iters=0)
"""Flags of a tiny run without evaluations."""


def _stop_and_go_on(
    prefix: Path,
    folder: Path,
    world: tuple[int, int],
    first: Any,
    resumed: Any,
    iterations: int = 6,
    *,
    at: int = 4,
    stops: bool = False,
    env: Mapping[str, str] | None = None,
) -> tuple[dict, dict]:
    """Losses of an uninterrupted run, and of a run that goes on in another way from its checkpoint ``at`` an iteration.

    With ``stops`` the uninterrupted run never saves, so a save that disturbs a run is seen; another one stops there.
    """
    whole_log, resumed_log, saved = folder / "whole.jsonl", folder / "parts.jsonl", folder / "saved"
    common: dict[str, Any] = {"train_iters": iterations}
    whole = {**common, **first, "log_json_file": whole_log}
    last = {**common, **resumed, "load": saved, "ckpt_step": at, "log_json_file": resumed_log}
    if stops:
        stopped = {**whole, "save": saved, "exit_interval": at, "log_json_file": resumed_log}
        train(world[0], unevaluated(prefix, **{**whole, "async_save": None}), unevaluated(prefix, **stopped), env=env)
    else:
        train(world[0], unevaluated(prefix, **whole, save=saved, save_interval=at), env=env)
    train(world[1], unevaluated(prefix, **last), env=env)
    losses, resumed_losses = read_losses(whole_log), read_losses(resumed_log)
    first_losses = {} if stops else {iteration: values for iteration, values in losses.items() if iteration <= at}
    assert resumed_losses.keys().isdisjoint(first_losses)
    return losses, first_losses | resumed_losses


GROWING: dict[str, Any] = {
    "curriculum_learning": True,
    "curriculum_seqlen_min": 4,
    "curriculum_seqlen_step": 2,
    "curriculum_seqlen_steps": 9,
    "train_iters": None,
    "train_tokens": 1200,
    "rampup_batch_size": "2 2 8",
    "lr_decay_style": "cosine",
    "lr_decay_tokens": 1100,
    "lr_warmup_tokens": 100,
}

SAME: dict[str, tuple[int, dict[str, Any]]] = {
    "one process with dropout, ramp-up and a cosine": (
        1,
        {
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "train_iters": None,
            "train_samples": 40,
            "rampup_batch_size": "2 2 8",
            "lr_decay_style": "cosine",
            "lr_warmup_samples": 6,
        },
    ),
    "bf16 on tp2 with asynchronous saves": (
        2,
        {"bf16": True, "tensor_model_parallel_size": 2, "async_save": True},
    ),
    "fp16 with skipped steps, sharded": (
        2,
        {"fp16": True, "initial_loss_scale": 2**23, "use_distributed_optimizer": True, "loss_scale_window": 3},
    ),
    "lamb with a mask of its directions, bf16 on tp2": (
        4,
        {
            "optimizer": "lamb",
            "bf16": True,
            "tensor_model_parallel_size": 2,
            "compress": ["dp-grad=stable-topk,density=0.3,interval=3"],
        },
    ),
    "muon with a mask of its directions, fp16, skipped steps, sharded dp2 tp2": (
        4,
        {
            "optimizer": "muon",
            "fp16": True,
            "initial_loss_scale": 2**23,
            "loss_scale_window": 3,
            "tensor_model_parallel_size": 2,
            "use_distributed_optimizer": True,
            "compress": ["dp-grad=stable-topk,density=0.3,interval=3"],
        },
    ),
    "compressors with state at every point": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "compress": [
                "dp-grad=powersgd,rank=2",
                "pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy",
                "pp-forward=fixpoint,bits=4,rounding=stochastic",
                "embedding=stable-topk,density=0.2,interval=3",
            ],
        },
    ),
    "quantized factors": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "compress": [
                "dp-grad=powersgd,rank=2,factors=fixpoint4",
                "pp-backward=lowrank,rank=2,factors=fixpoint8,error-feedback=lazy",
            ],
        },
    ),
    "delta codecs over several epochs, with evictions": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "sample_order": "fixed",
            "seq_length": 64,
            "max_position_embeddings": 64,
            "compress": [
                "pp-forward=delta-lowbits,bits=3,cache=9,rounding=stochastic",
                "pp-backward=fixpoint,bits=6@0/4.5@3,group=16,grid=minmax,rotation=16,rotate-when=outlier",
            ],
        },
    ),
    "messages in parts, each with its own memory, in evaluation too": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "scatter_gather_tensors_in_pipeline": True,
            "eval_interval": 3,
            "eval_iters": 1,
            "compress": [
                "pp-forward=delta,bits=3,predict=token,eval=on,rounding=stochastic",
                "pp-backward=lowrank,rank=2,error-feedback=lazy",
            ],
        },
    ),
    "parameters gathered as differences": (
        2,
        {"use_distributed_optimizer": True, "compress": ["param-gather=fixpoint,bits=4,rounding=stochastic"]},
    ),
    **{
        f"parameters of the {end} stage gathered as differences": (
            4,
            {
                "pipeline_model_parallel_size": 2,
                "untie_embeddings_and_output_weights": True,
                "use_distributed_optimizer": True,
                "compress": [f"param-gather=fixpoint,bits=4,stages={end}:1"],
            },
        )
        for end in ("first", "last")
    },
    "parameters and gradients in 8-bit floats": (
        2,
        {
            "bf16": True,
            "use_distributed_optimizer": True,
            "compress": ["param-gather=float8,rounding=stochastic", "dp-grad=float8,format=e5m2,error-feedback=on"],
        },
    ),
    "quantized adam, stopped when it is on": (
        4,
        {"tensor_model_parallel_size": 2, "compress": ["dp-grad=quantized-adam,bits=4,warmup=2,rounding=stochastic"]},
    ),
    "quantized adam with fp16, stopped in a warm-up with skipped steps": (
        2,
        {
            "fp16": True,
            "initial_loss_scale": 2**23,
            "hysteresis": 1,
            "compress": ["dp-grad=quantized-adam,bits=8,warmup=6"],
        },
    ),
    "low rank on one of the stages that hold the embedding": (
        4,
        {"pipeline_model_parallel_size": 2, "compress": ["dp-grad=powersgd,rank=2,stages=first:1"]},
    ),
    "stable top-k on tensor-parallel ranks": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "compress": ["dp-grad=stable-topk,density=0.2,interval=3,flush=rotate"],
        },
    ),
    "chunked top-k whose residual fades": (
        4,
        {"tensor_model_parallel_size": 2, "compress": ["dp-grad=chunked-topk,chunk=64,k=8,feedback-decay=0.95"]},
    ),
    "compressed buckets with fp16 and skipped steps": (
        2,
        {
            "fp16": True,
            "initial_loss_scale": 2**23,
            "loss_scale_window": 3,
            "compress": ["dp-grad=fixpoint,bits=3,error-feedback=on,rounding=stochastic"],
        },
    ),
    "sequences and batches grow, counted in tokens": (
        4,
        {
            **GROWING,
            "pipeline_model_parallel_size": 2,
            "sample_order": "fixed",
            "compress": ["pp-forward=delta,bits=4", "pp-backward=lowrank,rank=2,error-feedback=lazy"],
        },
    ),
    "sequences and batches grow, and iterations are left out": (1, {**GROWING, "iterations_to_skip": "3 6-7"}),
    "delayed gradients, compressed, fp16": (
        4,
        {
            "delay": 1,
            "delay_correction": "lookahead",
            "pipeline_model_parallel_size": 2,
            "fp16": True,
            "initial_loss_scale": 2**23,
            "hysteresis": 1,
            "ddp_bucket_size": 500,
            "compress": [
                "dp-grad=stable-topk,density=0.2,interval=3",
                "pp-forward=fixpoint,bits=4,rounding=stochastic",
                "embedding=powersgd,rank=2",
            ],
        },
    ),
    "delayed gradients, clipped before sums, and iterations are left out": (
        2,
        {
            "delay": 1,
            "compress": ["dp-grad=quantized-adam,bits=8,warmup=2"],
            "iterations_to_skip": "4",
        },
    ),
    "delayed gradients, sharded, sequences and batches grow, and iterations are left out": (
        2,
        {
            "delay": 1,
            "delay_correction": "extrapolate",
            "use_distributed_optimizer": True,
            **GROWING,
            "iterations_to_skip": "3 6-7",
        },
    ),
    "a pipeline without a flush, compressed": (
        4,
        {
            "delay": 1,
            "delay_correction": "lookahead",
            "no_pipeline_flush": True,
            "pipeline_model_parallel_size": 2,
            "sample_order": "fixed",
            "eval_interval": 3,
            "eval_iters": 1,
            "compress": [
                "dp-grad=stable-topk,density=0.2,interval=3",
                "pp-forward=delta,bits=3,cache=9",
                "pp-backward=lowrank,rank=2,error-feedback=lazy",
            ],
        },
    ),
    "a pipeline without a flush, sequences and batches grow, and iterations are left out": (
        2,
        {
            "delay": 1,
            "no_pipeline_flush": True,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "eager-1f1b",
            **GROWING,
            "iterations_to_skip": "3 6-7",
        },
    ),
    "a pipeline without a flush whose gradients overflow before and after the save": (
        2,
        {
            "delay": 1,
            "no_pipeline_flush": True,
            "pipeline_model_parallel_size": 2,
            "fp16": True,
            "initial_loss_scale": 2**20,
            "hysteresis": 1,
            "train_iters": 9,
        },
    ),
    "virtual stages": (
        2,
        {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    ),
}


STOPPED = (
    "one process with dropout, ramp-up and a cosine",
    "fp16 with skipped steps, sharded",
    "compressors with state at every point",
    "parameters gathered as differences",
    "delayed gradients, compressed, fp16",
    "a pipeline without a flush, compressed",
)
"""Compared with a run that never saves; the others save on their way."""
REPEATS = (
    "lamb with a mask of its directions, bf16 on tp2",
    "quantized factors",
    "parameters of the last stage gathered as differences",
    "stable top-k on tensor-parallel ranks",
    "chunked top-k whose residual fades",
    "sequences and batches grow, counted in tokens",
    "a pipeline without a flush, sequences and batches grow, and iterations are left out",
)
"""The others have each kind of state, optimizer, precision and count of these, if in other combinations."""


@pytest.mark.parametrize("name", mark_repeats(SAME, keep=SAME.keys() - set(REPEATS)))
def test_resume_is_exact_at_the_same_layout(prefix: Path, tmp_path: Path, name: str) -> None:
    world_size, changes = SAME[name]
    resumed = {**changes, "async_save": None}
    # Lost state of a compressor may show later: when it chooses anew, and much later when a sample returns.
    late = "sample_order" in changes
    soon = "fp16" in changes or any(word in str(changes.get("compress")) for word in ("interval", "quantized-adam"))
    at, iterations = (8, 16) if late else (4, 8 if soon else 6)
    losses, resumed_losses = _stop_and_go_on(
        prefix,
        tmp_path,
        (world_size, world_size),
        changes,
        resumed,
        iterations,
        at=at,
        stops=name in STOPPED,
    )
    left_out = changes.get("iterations_to_skip") == "4"
    assert len(losses) >= (iterations - left_out if "train_tokens" not in changes else 8)
    assert resumed_losses == losses
    if "fp16" in name:
        updates = [norm is not None for _, norm in losses.values()]
        assert sum(updates) < len(updates) - ("delayed" in name), "no step was skipped: the case tests nothing"


def _plug_in(folder: Path, point: str) -> dict[str, Any]:
    """Flags of the documented compressor that has a controller and a memory."""
    code = python_blocks("extend/advanced-compressors.md")[1]
    assert sum(bool(line.strip()) for line in code.splitlines()) < 60
    (folder / "mine.py").write_text(code)
    spec = f"{point}=large-rows,share=0.6,least=0.05,error-feedback=on"
    return {"compress_module": folder / "mine.py", "compress": [spec]}


def _controller(folder: Path, point: str = "dp-grad") -> dict[str, float]:
    """The state that a checkpoint holds of the only controller."""
    controllers = json.loads((folder / "common.json").read_text())["controllers"]
    assert list(controllers) == [point]
    state: dict[str, float] = controllers[point]["state"]
    return state


@pytest.mark.parametrize("point", mark_repeats(["dp-grad", "embedding"], keep=["dp-grad"]))
def test_a_plug_in_with_a_controller_and_a_memory_resumes_exactly(prefix: Path, tmp_path: Path, point: str) -> None:
    """As every built-in does, without a word about it in any engine."""
    changes = {**_plug_in(tmp_path, point), "pipeline_model_parallel_size": 2}
    losses, resumed_losses = _stop_and_go_on(prefix, tmp_path, (4, 4), changes, changes, 12)
    assert len(losses) == 12
    assert resumed_losses == losses
    state = _controller(tmp_path / "saved" / "iter_0000004", point)
    assert state["first"] > 0
    assert 0.05 <= state["share"] < 0.6, "the controller never moved: the case tests nothing"


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}], ids=["dp2", "tp2"])
def test_a_plug_in_resumes_at_another_layout(prefix: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Its memory finds its parameters again, its controller its numbers; where a memory cannot, that is said."""
    changes, saved = _plug_in(tmp_path, "dp-grad"), tmp_path / "saved"
    train(4, unevaluated(prefix, **changes, train_iters=12, exit_interval=6, save=saved))
    ranks = 4 if layout else 2
    flags = unevaluated(prefix, **changes, **layout, train_iters=12, load=saved, save=tmp_path / "then")
    lines = run_cli(ranks, [SCRIPT, *flags]).check().stdout
    assert ("norms" in lines) == bool(layout)
    assert ("is left out" in lines) == bool(layout)
    assert "starts anew" not in lines
    before, after = (
        json.loads((folder / f"iter_00000{iteration:02}" / "common.json").read_text())["controllers"]["dp-grad"][
            "state"
        ]
        for folder, iteration in ((saved, 6), (tmp_path / "then", 12))
    )
    assert after["first"] == before["first"] > 0


def test_a_controllers_state_without_a_controller_is_named(prefix: Path, tmp_path: Path) -> None:
    changes, saved = _plug_in(tmp_path, "dp-grad"), tmp_path / "saved"
    train(2, unevaluated(prefix, **changes, train_iters=4, save=saved))
    dense = run_cli(2, [SCRIPT, *unevaluated(prefix, train_iters=6, load=saved)]).check()
    lost = "warning: the state of dp-grad=large-rows's controller has no place in this run and is left out"
    assert lost in dense.stdout
    flags = unevaluated(prefix, train_iters=6, load=saved, compress=["dp-grad=edgc,rank=4"])
    other = run_cli(2, [SCRIPT, *flags]).check()
    assert lost in other.stdout
    assert "holds no state of the controller of dp-grad=edgc: it starts anew" in other.stdout


def test_changes_of_the_delay_are_named(prefix: Path, tmp_path: Path) -> None:
    saved, saved_at_once = tmp_path / "saved", tmp_path / "saved_at_once"
    train(2, unevaluated(prefix, train_iters=4, delay=1, save=saved))
    at_once = run_cli(2, [SCRIPT, *unevaluated(prefix, train_iters=6, load=saved, save=saved_at_once)]).check()
    assert "the gradients of iteration 4 are never applied, since --delay is 0 now" in at_once.stdout
    flags = unevaluated(prefix, train_iters=6, load=saved, delay=1, delay_correction="lookahead")
    late = run_cli(2, [SCRIPT, *flags]).check().stdout
    assert "the first updates are without --delay-correction lookahead, which has no state yet" in late
    assert "never applied" not in late
    assert "no gradients in flight" not in late
    late_again = run_cli(2, [SCRIPT, *unevaluated(prefix, train_iters=8, load=saved_at_once, delay=1)]).check().stdout
    assert "the first step makes no update, since the checkpoint has no gradients in flight for --delay 1" in late_again


def test_a_checkpoint_of_an_earlier_version_resumes(prefix: Path, tmp_path: Path) -> None:
    """Its only controller had another name, and nothing said when the variances were frozen."""
    changes = {"compress": ["dp-grad=edgc,rank=10,min-rank=2,window=3,sample-every=1,max-step=8,stage-slack=0"]}
    whole_log, saved = tmp_path / "whole.jsonl", tmp_path / "saved"
    train(2, unevaluated(prefix, **changes, train_iters=16, log_json_file=whole_log))
    train(2, unevaluated(prefix, **changes, train_iters=16, exit_interval=4, save=saved))
    path = saved / "iter_0000004" / "common.json"
    common = json.loads(path.read_text())
    common["rank_controller"] = common.pop("controllers")["dp-grad"]["state"]
    del common["variance_frozen_at"]
    reseal(path.parent, {path.name: json.dumps(common).encode()})
    train(2, unevaluated(prefix, **changes, train_iters=16, load=saved, log_json_file=tmp_path / "then.jsonl"))
    expected = {iteration: values for iteration, values in read_losses(whole_log).items() if iteration > 4}
    assert read_losses(tmp_path / "then.jsonl") == expected


def test_a_dense_run_continues_with_radius(prefix: Path, tmp_path: Path) -> None:
    """Adam's moments come along; the first step is dense, so it equals the dense run's, and so do later steps
    at density 1."""
    dense = tmp_path / "dense"
    whole_log, radius, full = (tmp_path / f"{name}.jsonl" for name in ("whole", "radius", "full"))
    train(2, unevaluated(prefix, train_iters=12, log_json_file=whole_log))
    train(2, unevaluated(prefix, train_iters=12, exit_interval=4, save=dense))
    for log, density in ((radius, 0.1), (full, 1)):
        spec = f"dp-grad=stable-topk,density={density},interval=4"
        flags = unevaluated(prefix, train_iters=12, load=dense, save=tmp_path / log.stem, compress=[spec])
        train(2, [*flags, "--log-json-file", str(log)])
    expected = {iteration: values for iteration, values in read_losses(whole_log).items() if iteration > 4}
    assert read_losses(full).keys() == read_losses(radius).keys() == expected.keys()
    for iteration, (loss, norm) in read_losses(full).items():
        assert (loss, norm) == pytest.approx(expected[iteration], rel=1e-5)
    sparse = read_losses(radius)
    assert sparse[5] == pytest.approx(expected[5], rel=1e-5)
    assert sparse[12][0] != pytest.approx(expected[12][0], rel=1e-6)
    assert sparse[12][0] < expected[5][0]


def _validation_losses(log: Path) -> list[float]:
    """Losses of the evaluations, in order."""
    return [event["lm_loss"] for event in read_events(log, "validation")]


def test_evaluations_of_a_checkpoint_compress_as_in_its_last_iteration(prefix: Path, tmp_path: Path) -> None:
    """With the bits of that iteration, not of the first one; also after an iteration without a step."""
    whole_log, evaluated_log, saved = tmp_path / "whole.jsonl", tmp_path / "evaluated.jsonl", tmp_path / "saved"
    flags = tiny_flags(
        prefix,
        pipeline_model_parallel_size=2,
        compress="pp-forward=fixpoint,bits=2@0/4@1/8@3,eval=on",
        train_iters=4,
        iterations_to_skip="4",
    )
    train(
        2,
        [*flags, "--save", str(saved), "--log-json-file", str(whole_log)],
        [*flags, "--load", str(saved), "--skip-train", "--log-json-file", str(evaluated_log)],
    )
    assert len(_validation_losses(whole_log)) == 1
    assert _validation_losses(evaluated_log) == _validation_losses(whole_log)
