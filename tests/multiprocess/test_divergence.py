"""Runs that diverge: how they end, and which checkpoints they leave."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import nan_codes
from tests.support.cli import CliResult, launch_ranks_cli, run_cli
from tests.support.corpus import tiny_flags

SCRIPT = "pretrain_gpt.py"
DIVERGING: dict[str, object] = {
    "optimizer": "sgd",
    "sgd_momentum": 0,
    "lr": 1e3,
    "weight_decay": 1e30,
    "lr_warmup_iters": 20,
    "clip_grad": 0,
    "train_iters": 24,
}
"""The first step has a learning rate of 0, the second multiplies the matrices by 5e31; losses and gradients are not
finite from the third step on, on any hardware."""


def _run(ranks: int, prefix: Path, **changes: object) -> list[CliResult]:
    with launch_ranks_cli(ranks, [SCRIPT, *tiny_flags(prefix, **{**DIVERGING, **changes})]) as processes:
        return processes.wait(60)


def _saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("iter_*"))


@pytest.mark.multiprocess
def test_a_diverged_run_ends_with_its_own_status_and_leaves_the_last_good_checkpoint(
    prefix: Path, tmp_path: Path
) -> None:
    save = tmp_path / "saved"
    flags = {"save": save, "save_interval": 1, "keep_last": 1, "max_skipped_steps": 4}
    results = _run(2, prefix, **flags, load=save)
    assert [result.returncode for result in results] == [5, 5], results[0].text()
    line = rf"error: the run has diverged: 4 steps in a row .* iteration 2;.*--load {save} --ckpt-step 1.*--lr"
    assert re.search(line, results[0].stderr), results[0].stderr
    assert results[0].stderr.count("error") == 1
    assert "error" not in results[1].stderr
    assert _saved(save) == ["iter_0000001", "iter_0000005"]
    # The line's advice works: nothing was saved over that checkpoint, and the run goes on from it.
    words = f"--load {save} --ckpt-step 1".split()
    changes = {"train_iters": 6, "lr": 1e-2, "weight_decay": 0.01, "lr_decay_iters": 24}
    advised = [SCRIPT, *tiny_flags(prefix, **DIVERGING | changes), *words]
    resumed = run_cli(1, [*advised, "--override-opt_param-scheduler"]).check()
    assert "number of skipped iterations:   1" not in resumed.stdout


@pytest.mark.multiprocess
def test_skipped_steps_are_counted_over_restarts(prefix: Path, tmp_path: Path) -> None:
    flags: dict[str, object] = {"save": tmp_path, "load": tmp_path, "exit_interval": 4, "max_skipped_steps": 4}
    first, second = (_run(1, prefix, **flags)[0] for _ in range(2))
    assert first.returncode == 0, first.text()
    assert second.returncode == 5, second.text()
    assert _saved(tmp_path) == ["iter_0000004"]
    assert "iteration        6/" in second.stdout
    assert "iteration        7/" not in second.stdout


@pytest.mark.multiprocess
def test_the_first_non_finite_number_ends_a_run_that_checks(prefix: Path, tmp_path: Path) -> None:
    flags: dict[str, object] = {"save": tmp_path, "save_interval": 1, "keep_last": 1}
    results = _run(2, prefix, **flags, check_for_nan_in_loss_and_grad=True, pipeline_model_parallel_size=2)
    assert [result.returncode for result in results] == [5, 5], results[0].text()
    line = r"error: the run has diverged: the loss of iteration 3 is not finite .*--check-for-nan-in-loss-and-grad"
    assert re.search(line, results[0].stderr), results[0].stderr
    assert _saved(tmp_path) == ["iter_0000001", "iter_0000002"]
    (overflow,) = _run(1, prefix, fp16=True, loss_scale=1e30, lr=1e-3, check_for_nan_in_loss_and_grad=True)
    assert overflow.returncode == 5, overflow.text()
    line = r"error: the run has diverged: a gradient of iteration 1 is not finite .*--check-for-nan-in-loss-and-grad"
    assert re.search(line, overflow.stderr), overflow.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("spec", "layout", "words"),
    [
        ("dp-grad=nan-codes,warmup=2,error-feedback=on", {}, "dp-grad=nan-codes turned finite numbers into NaN"),
        ("pp-forward=nan-codes,warmup=2", {"pipeline_model_parallel_size": 2}, "pp-forward=nan-codes turned finite"),
        (
            "param-gather=nan-codes,warmup=2",
            {"use_distributed_optimizer": True},
            r"with a lower --lr or other data, or without --compress \(param-gather\)$",
        ),
    ],
)
def test_a_compressor_that_makes_a_run_diverge_is_named(
    spec: str, layout: dict[str, object], words: str, prefix: Path
) -> None:
    flags = {"compress_module": nan_codes.MODULE, "compress": [spec], "max_skipped_steps": 3, "train_iters": 8}
    with launch_ranks_cli(2, [SCRIPT, *tiny_flags(prefix, **flags, **layout)]) as processes:
        results = processes.wait(60)
    assert [result.returncode for result in results] == [5, 5], results[0].text()
    line = rf"^error: the run has diverged: 3 steps in a row were skipped .*{words}"
    assert re.search(line, results[0].stderr, re.MULTILINE), results[0].stderr


@pytest.mark.multiprocess
def test_a_falling_loss_scale_is_no_divergence(prefix: Path) -> None:
    """Overflows at 1e30 (twice), 5e29, 2.5e29 and 1.25e29 are a search; those at 1e29, the least, are counted."""
    flags: dict[str, object] = {"fp16": True, "initial_loss_scale": 1e30, "min_loss_scale": 1e29, "lr": 1e-3}
    for count, flag in ((8, {"max_skipped_steps": 3}), (6, {"check_for_nan_in_loss_and_grad": True})):
        (result,) = _run(1, prefix, **flags, **flag)
        assert result.returncode == 5, result.text()
        assert f"iteration {count:8d}/" in result.stdout
        assert f"iteration {count + 1:8d}/" not in result.stdout


@pytest.mark.multiprocess
def test_a_run_that_ends_before_the_limit_of_skipped_steps_says_so(prefix: Path) -> None:
    (result,) = _run(1, prefix, train_iters=5, lr_decay_iters=24)
    assert result.returncode == 0, result.text()
    assert "warning: the last 3 steps were skipped" in result.stdout
