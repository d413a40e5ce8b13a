"""Resuming with other settings: layouts, precisions, batch sizes, samples, skipped iterations."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.find import read_tracker
from megatron.training.pretrain import main
from tests.multiprocess.test_resume import SCRIPT, _stop_and_go_on
from tests.support.cli import launch_ranks_cli, run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events, read_losses
from tests.support.reseal import reseal
from tests.support.spawn import run_ranks
from tests.support.train import train

pytestmark = pytest.mark.multiprocess


AHEAD = {"delay": 1, "delay_correction": "lookahead"}
SWIGLU = {"swiglu": True, "ffn_hidden_size": 32}

LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, Any], dict[str, Any]]] = {
    "one process to tp2 pp2": (
        (1, 4),
        {},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    ),
    "sharded dp2 tp2 to one process": (
        (4, 1),
        {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True, "sequence_parallel": True},
        {},
    ),
    "virtual pp2 to sharded dp2": (
        (2, 2),
        {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
        {"num_layers": 4, "use_distributed_optimizer": True},
    ),
    "lamb, sharded dp2 tp2 to pp2": (
        (4, 2),
        {"optimizer": "lamb", "tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
        {"optimizer": "lamb", "pipeline_model_parallel_size": 2},
    ),
    "muon, sharded dp2 tp2 to pp2": (
        (4, 2),
        {"optimizer": "muon", "tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
        {"optimizer": "muon", "pipeline_model_parallel_size": 2},
    ),
    "delayed gradients, sharded dp2 tp2 to pp2": (
        (4, 2),
        {**AHEAD, "tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
        {**AHEAD, "pipeline_model_parallel_size": 2},
    ),
    "another padding of the vocabulary": (
        (2, 1),
        {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 48, **SWIGLU},
        SWIGLU,
    ),
}


@pytest.mark.parametrize("name", mark_repeats(LAYOUTS, keep=LAYOUTS.keys() - {"sharded dp2 tp2 to one process"}))
def test_resume_at_another_layout_agrees(prefix: Path, tmp_path: Path, name: str) -> None:
    world, first, resumed = LAYOUTS[name]
    losses, resumed_losses = _stop_and_go_on(prefix, tmp_path, world, first, resumed)
    assert sorted(resumed_losses) == sorted(losses) == list(range(1, 7))
    for iteration, (loss, norm) in losses.items():
        assert resumed_losses[iteration][0] == pytest.approx(loss, rel=1e-5), iteration
        assert (resumed_losses[iteration][1] or 0.0) == pytest.approx(norm or 0.0, rel=1e-4), iteration


GATHERED = [
    pytest.param("fixpoint,bits=4,group=2048", {}, 0.01, id="4 bits, dp2 to dp4"),
    pytest.param("float8", {"tensor_model_parallel_size": 2}, 0.01, id="8-bit floats, dp2 to tp2 dp2"),
    pytest.param(
        "float8,format=e5m2,scale-dtype=e8m0",
        {"tensor_model_parallel_size": 2},
        1e-5,
        id="powers of two, dp2 to tp2 dp2",
    ),
]


@pytest.mark.parametrize(
    ("spec", "layout", "later"),
    mark_repeats(GATHERED, keep=["4 bits, dp2 to dp4", "powers of two, dp2 to tp2 dp2"]),
)
def test_gathered_differences_resume_at_another_layout(
    prefix: Path, tmp_path: Path, spec: str, layout: dict[str, Any], later: float
) -> None:
    """The next iteration has the model's values, not the optimizer's. Then each layout has its own groups;
    where scales are powers of two, floats do not depend on them, and the run goes on as before."""
    common = {"use_distributed_optimizer": True, "compress": [f"param-gather={spec}"], "check_replicas": 1}
    common |= {"global_batch_size": 4, "lr": 0.01}
    losses, resumed_losses = _stop_and_go_on(prefix, tmp_path, (2, 4), common, {**common, **layout})
    assert sorted(resumed_losses) == sorted(losses) == list(range(1, 7))
    assert resumed_losses[5] == pytest.approx(losses[5], rel=1e-5)
    for iteration, (loss, _) in losses.items():
        assert resumed_losses[iteration][0] == pytest.approx(loss, rel=later), iteration


def test_precision_changes_keep_the_best_values(prefix: Path, tmp_path: Path) -> None:
    """bf16 to fp32 takes the optimizer's fp32 values; back again starts them from the model's."""
    saved = tmp_path / "saved"
    train(1, tiny_flags(prefix, bf16=True, save=saved, train_iters=4))
    train(1, tiny_flags(prefix, bf16=True, load=saved, train_iters=5, log_json_file=tmp_path / "half.jsonl"))
    train(1, tiny_flags(prefix, load=saved, save=saved, train_iters=5, log_json_file=tmp_path / "full.jsonl"))
    assert read_losses(tmp_path / "full.jsonl")[5][0] == pytest.approx(
        read_losses(tmp_path / "half.jsonl")[5][0], rel=1e-2
    )
    train(1, tiny_flags(prefix, bf16=True, load=saved, train_iters=6, log_json_file=tmp_path / "back.jsonl"))
    assert list(read_losses(tmp_path / "back.jsonl")) == [6]


def test_finetune_starts_counting_anew(prefix: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    train(1, tiny_flags(prefix, save=saved, train_iters=30, no_save_optim=True, log_json_file=tmp_path / "a.jsonl"))
    train(1, tiny_flags(prefix, load=saved, finetune=True, train_iters=2, log_json_file=tmp_path / "b.jsonl"))
    before, after = read_losses(tmp_path / "a.jsonl"), read_losses(tmp_path / "b.jsonl")
    assert sorted(after) == [1, 2]
    assert after[1][0] < before[1][0] - 0.3


def test_adams_moments_are_refused_for_lamb(prefix: Path, tmp_path: Path) -> None:
    """They have the same names and shapes; the weights alone can be taken."""
    saved = tmp_path / "saved"
    train(1, tiny_flags(prefix, save=saved, train_iters=2))
    lamb = tiny_flags(prefix, load=saved, optimizer="lamb", train_iters=3)
    refused = run_cli(1, [SCRIPT, *lamb])
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: --load {saved} has the state of another optimizer; give --optimizer adam instead of lamb, or "
        "--no-load-optim to begin with new moments\n"
    )
    train(1, [*lamb, "--no-load-optim"])


OTHER_SIZES: list[tuple[dict[str, Any], int, list[int]]] = [
    ({"train_iters": 6}, 3, [4, 5, 6]),
    ({"train_iters": 6}, 6, [4, 5, 6]),
    ({"train_iters": None, "train_samples": 24}, 2, [4, 5, 6, 7, 8, 9]),
    ({"train_iters": None, "train_samples": 24}, 6, [4, 5]),
]


@pytest.mark.parametrize(
    ("length", "size", "iterations"), mark_repeats(OTHER_SIZES, keep=[OTHER_SIZES[1], OTHER_SIZES[2]])
)
def test_a_run_resumes_with_another_batch_size(
    prefix: Path, tmp_path: Path, length: dict[str, Any], size: int, iterations: list[int]
) -> None:
    """To its number of iterations with as many samples as they take, or to its number of samples."""
    saved, log = tmp_path / "saved", tmp_path / "log.jsonl"
    train(1, tiny_flags(prefix, **length, save=saved, exit_interval=3))
    train(1, tiny_flags(prefix, **length, load=saved, save=saved, global_batch_size=size, log_json_file=log))
    assert list(read_losses(log)) == iterations
    again = run_cli(1, [SCRIPT, *tiny_flags(prefix, **length, load=saved, save=saved, global_batch_size=size)]).check()
    assert f"nothing is left to train or to save: the run is at iteration {iterations[-1]} of" in again.stdout


def test_checkpoint_arguments_and_wrong_models(prefix: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    train(1, tiny_flags(prefix, save=saved, train_iters=2))
    shape = {"num_layers": None, "hidden_size": None, "num_attention_heads": None}
    train(1, tiny_flags(prefix, load=saved, use_checkpoint_args=True, train_iters=3, **shape))
    wrong = run_cli(1, [SCRIPT, *tiny_flags(prefix, load=saved, num_layers=3)])
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert "another model" in wrong.stderr
    assert "--num-layers" in wrong.stderr
    assert len(wrong.stderr.strip().splitlines()) == 1
    missing = run_cli(1, [SCRIPT, *tiny_flags(prefix, load=tmp_path / "no", exit_on_missing_checkpoint=True)])
    assert missing.returncode == 2
    assert "holds no checkpoint" in missing.stderr


def test_an_earlier_checkpoint_can_be_named(prefix: Path, tmp_path: Path) -> None:
    """--ckpt-step and --load-tag go on from it, and --no-load-lr-state begins the schedule anew."""
    saved, logs = tmp_path / "saved", {name: tmp_path / f"{name}.jsonl" for name in ("whole", "step", "tag", "lr")}
    common = {"train_iters": 6, "lr_decay_style": "linear", "lr_warmup_iters": 2}
    train(1, tiny_flags(prefix, **common, save=saved, save_interval=2, log_json_file=logs["whole"]))
    again = {**common, "load": saved}
    train(1, tiny_flags(prefix, **again, ckpt_step=2, log_json_file=logs["step"]))
    train(1, tiny_flags(prefix, **again, load_tag="global_step4", log_json_file=logs["tag"]))
    train(1, tiny_flags(prefix, **again, ckpt_step=2, no_load_lr_state=True, log_json_file=logs["lr"]))
    losses = read_losses(logs["whole"])
    assert read_losses(logs["step"]) == {n: losses[n] for n in (3, 4, 5, 6)}
    assert read_losses(logs["tag"]) == {n: losses[n] for n in (5, 6)}
    rates = {
        name: [event["learning_rate"] for event in map(json.loads, path.read_text().splitlines()) if "lm_loss" in event
               and event["kind"] == "train"]
        for name, path in logs.items()
    }  # fmt: skip
    assert rates["step"] == rates["whole"][2:]
    assert rates["lr"] == rates["whole"][:4]
    assert list(read_losses(logs["lr"])) == [3, 4, 5, 6]
    missing = run_cli(1, [SCRIPT, *tiny_flags(prefix, **again, ckpt_step=3)])
    assert missing.returncode == 2
    assert "complete checkpoints, newest first: 6, 4, 2; name one of them (--ckpt-step 6)" in missing.stderr


def test_other_samples_than_the_checkpoints_cause_warnings(prefix: Path, tmp_path: Path) -> None:
    """A line for each, on a single rank, and none where nothing differs, or the run begins anew."""
    other = write_documents(tmp_path / "other", seed=5)
    train(1, tiny_flags(prefix, train_iters=4, save=tmp_path / "saved"))
    common: dict[str, Any] = {"train_iters": 5, "load": tmp_path / "saved"}
    changed = {"data_path": f"0.5 {prefix} 0.5 {other}", "seed": 5, "eod_mask_loss": True, "seq_length": 8}
    lines = {}
    for name, flags in (("same", {}), ("changed", changed), ("finetune", {**changed, "finetune": True})):
        with launch_ranks_cli(2, [SCRIPT, *tiny_flags(prefix, **common, **flags)]) as ranks:
            text = "".join(result.check().stdout for result in ranks.wait(60))
        lines[name] = [line for line in text.splitlines() if line.startswith("warning: this run has --")]
    assert lines["same"] == lines["finetune"] == []
    flags_named = [line.split()[4].rstrip(";") for line in lines["changed"]]
    assert sorted(flags_named) == ["--data-path", "--eod-mask-loss", "--seed", "--seq-length"]
    assert all("16" in line for line in lines["changed"]), "samples consumed so far: 4 iterations of 4"


class _Wandb(types.ModuleType):
    """A stand-in for the package wandb that writes down how runs are started."""

    Error = OSError

    def __init__(self, record: Path) -> None:
        super().__init__("wandb")
        self.record, self.config, self.id = record, self, "first"
        self.update = self.define_metric = self.log = self.finish = lambda *args, **kwargs: None

    def init(self, **options: Any) -> _Wandb:
        with self.record.open("a") as file:
            file.write(f"{options.get('id')} {options.get('resume')}\n")
        return self


def _train_with_wandb(record: Path, flags: list[str]) -> None:
    sys.modules["wandb"] = _Wandb(record)
    assert main(flags) == 0


def test_curves_continue_in_the_run_of_the_checkpoint(prefix: Path, tmp_path: Path) -> None:
    """The last rank logs, and rank 0 saves the name of the run; a new run with a checkpoint's weights has its own."""
    record, saved = tmp_path / "runs", tmp_path / "saved"
    common: dict[str, Any] = {"train_iters": 4, "load": saved, "wandb_project": "mine"}
    for changes in ({"save": saved, "exit_interval": 2}, {}, {"finetune": True}):
        run_ranks(2, _train_with_wandb, record, tiny_flags(prefix, **common, **changes), init=False)
    assert record.read_text().splitlines() == ["None None", "first allow", "None None"]


def test_a_schedule_of_batch_sizes_resumes_exactly(prefix: Path, tmp_path: Path) -> None:
    """Thresholds at samples 4 and 25; the run, its decay and its warm-up are counted in tokens, too."""
    flags: dict[str, Any] = {
        "global_batch_size": None,
        "step_batch_size_schedule": "0:2,400:4,64:6",
        "train_iters": None,
        "train_tokens": 40 * 16,
        "lr_decay_style": "cosine",
        "lr_decay_tokens": 600,
        "lr_warmup_tokens": 100,
    }
    losses = _stop_and_go_on(prefix, tmp_path, (2, 2), flags, flags, iterations=0, stops=True)
    assert losses[0] == losses[1]
    sizes = [event["global_batch_size"] for event in read_events(tmp_path / "parts.jsonl")]
    assert sizes == [2, 2, 6, 6, 6, 6, 4, 4, 4]


def test_iterations_to_skip_consume_their_samples_and_take_no_step(prefix: Path, tmp_path: Path) -> None:
    """Oracle: a checkpoint whose position is moved over the samples that are left out. Saves that are due there are
    done, and a run that is stopped among them goes on."""
    log, saved, text = tmp_path / "log.jsonl", tmp_path / "saved", tmp_path / "log.txt"
    common: dict[str, Any] = {"train_iters": 7, "lr_decay_style": "linear", "save": saved, "load": saved}
    skipping = {**common, "iterations_to_skip": "3 4-5 9", "save_interval": 2, "log_json_file": log}
    skipping["log_txt_file"] = text
    for interval in (4, None):
        train(2, tiny_flags(prefix, **skipping, exit_interval=interval))
    assert sorted(path.name for path in saved.glob("iter_*")) == [f"iter_000000{n}" for n in (2, 4, 6, 7)]
    steps = {event["iteration"]: event for event in read_events(log)}
    assert list(steps) == [1, 2, 6, 7]
    assert [steps[number]["consumed_samples"] for number in steps] == [4, 8, 24, 28]
    assert [steps[number]["consumed_tokens"] for number in steps] == [64, 128, 192, 256]
    sizes = [event["size"]["tokens"] for event in read_events(log, "config")]
    assert sizes == [4 * 4 * 16] * 2
    lines = [line for line in text.read_text().splitlines() if "--iterations-to-skip:" in line]
    outcome = "without a step; their samples count as consumed"
    assert lines == [
        f"--iterations-to-skip: {iterations} {outcome}" for iterations in ("iterations 3 to 5", "iteration 5")
    ]

    path = saved / "iter_0000002" / "common.json"
    moved = json.loads(path.read_text())
    moved["progress"] |= {"iteration": 5, "consumed_samples": 20}
    reseal(path.parent, {path.name: json.dumps(moved).encode()})
    oracle = tmp_path / "oracle.jsonl"
    train(2, tiny_flags(prefix, **{**common, "save": None}, ckpt_step=2, log_json_file=oracle))
    expected = read_losses(oracle)
    assert list(expected) == [6, 7]
    assert {number: read_losses(log)[number] for number in expected} == expected


def _train_with_a_signal(flags: list[str], log: Path, rank_of_signal: int | None) -> int:
    """A rank gets a signal as soon as the log says that iterations are skipped."""

    def send() -> None:
        while not log.exists() or "--iterations-to-skip:" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    if rank_of_signal == int(os.environ["RANK"]):
        threading.Thread(target=send, daemon=True).start()
    return main(flags)


@pytest.mark.parametrize("reason", ["signal", "duration"])
def test_a_run_is_stopped_among_iterations_to_skip(prefix: Path, tmp_path: Path, reason: str) -> None:
    """On all ranks after the same iteration, though only one has the signal."""
    most, saved, log = 100_000, tmp_path / "saved", tmp_path / "log.txt"
    stop: dict[str, Any] = {"exit_duration_in_mins": 1e-6} if reason == "duration" else {"exit_signal_handler": True}
    skipping = {"train_iters": most, "iterations_to_skip": f"1-{most}", "save": saved, "log_txt_file": log}
    flags, rank = tiny_flags(prefix, **{**skipping, **stop}), 1 if reason == "signal" else None
    assert run_ranks(2, _train_with_a_signal, flags, log, rank, init=False) == [0, 0]
    iteration = read_tracker(saved)
    assert isinstance(iteration, int)
    assert iteration == 1 if reason == "duration" else 1 < iteration < most


def test_the_last_steps_are_logged_between_lines(prefix: Path, tmp_path: Path) -> None:
    """At the end of a run, and where it is stopped."""
    each, windows = tmp_path / "each.jsonl", tmp_path / "windows.jsonl"
    common: dict[str, Any] = {"train_iters": 10, "save": tmp_path / "saved", "load": tmp_path / "saved"}
    train(1, tiny_flags(prefix, train_iters=10, log_json_file=each))
    for stop in (5, None):
        train(1, tiny_flags(prefix, **common, log_interval=4, exit_interval=stop, log_json_file=windows))
    losses = [loss for loss, _ in read_losses(each).values()]
    expected = {4: losses[:4], 5: losses[4:5], 8: losses[5:8], 10: losses[8:]}
    logged = {iteration: loss for iteration, (loss, _) in read_losses(windows).items()}
    assert logged == {iteration: pytest.approx(sum(steps) / len(steps)) for iteration, steps in expected.items()}
