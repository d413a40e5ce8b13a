"""Runs that begin with the weights of another run: --pretrained-checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.islands import IslandsConfig
from megatron.config.run import RunConfig
from megatron.training.pretrain import main
from megatron.training.saved_run import with_pretrained
from tests.support.corpus import tiny_flags
from tests.support.events import read_events

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def pretrained(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    assert main(tiny_flags(prefix, train_iters=3, save=folder, bf16=True)) == 0
    return folder


def _steps(log: Path) -> list[tuple[int, float, float, int]]:
    names = ("iteration", "lm_loss", "learning_rate", "consumed_samples")
    return [tuple(event[name] for name in names) for event in read_events(log)]


def test_the_same_command_begins_with_the_weights_and_resumes(
    prefix: Path, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: --finetune. Everything but the weights is new; the run's own checkpoint goes first."""
    common: dict[str, Any] = {"train_iters": 4, "lr_decay_style": "linear", "lr_warmup_iters": 1, "bf16": True}
    logs = {name: tmp_path / f"{name}.jsonl" for name in ("oracle", "parts", "unsaved", "random")}
    saved = tmp_path / "saved"
    oracle = {"load": pretrained, "finetune": True, "log_json_file": logs["oracle"]}
    assert main(tiny_flags(prefix, **common, **oracle)) == 0
    flags = {"load": saved, "save": saved, "pretrained_checkpoint": pretrained, "log_json_file": logs["parts"]}
    capsys.readouterr()
    for stop in (2, None):
        assert main(tiny_flags(prefix, **common, **flags, use_checkpoint_args=True, exit_interval=stop)) == 0
    assert capsys.readouterr().out.count(f"beginning with the weights of --pretrained-checkpoint {pretrained}") == 1
    assert main(tiny_flags(prefix, **common, pretrained_checkpoint=pretrained, log_json_file=logs["unsaved"])) == 0
    assert main(tiny_flags(prefix, **common, log_json_file=logs["random"])) == 0
    steps = {name: _steps(log) for name, log in logs.items()}
    assert steps["parts"] == steps["unsaved"] == steps["oracle"]
    assert [iteration for iteration, *_ in steps["parts"]] == [1, 2, 3, 4]
    assert abs(steps["parts"][0][1] - steps["random"][0][1]) > 1e-3


def test_an_unusable_pretrained_checkpoint_is_named(
    prefix: Path, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes, message in (
        ({"pretrained_checkpoint": tmp_path}, f"error: --pretrained-checkpoint {tmp_path} holds no checkpoint; name"),
        ({"pretrained_checkpoint": pretrained, "ckpt_step": 3}, "--ckpt-step needs --load FOLDER"),
        ({"pretrained_checkpoint": pretrained, "load": tmp_path / "none", "ckpt_step": 3}, "none"),
    ):
        capsys.readouterr()
        assert main(tiny_flags(prefix, **changes)) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert message in error
    other = {"train_iters": 1, "pretrained_checkpoint": pretrained, "layernorm_epsilon": 1e-3}
    assert main(tiny_flags(prefix, **other)) == 0
    assert f"that of --pretrained-checkpoint {pretrained} has --norm-epsilon 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--pretrained-checkpoint", "--finetune --load"])
def test_a_diverged_run_is_not_sent_back_to_its_pretrained_checkpoint(
    prefix: Path, pretrained: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """The other run's iterations do not count."""
    diverging = {"optimizer": "sgd", "lr": 1e3, "lr_warmup_iters": 20, "clip_grad": 0, "train_iters": 24}
    capsys.readouterr()
    assert main([*tiny_flags(prefix, **diverging, max_skipped_steps=2), *flag.split(), str(pretrained)]) == 5
    errors = capsys.readouterr().err
    assert "the run has diverged" in errors
    assert str(pretrained) not in errors


def test_islands_begin_with_it_unless_an_island_has_saved(pretrained: Path, tmp_path: Path) -> None:
    """A late island with an empty folder goes on with the others."""
    notes: list[str] = []
    checkpoint = CheckpointConfig(load=str(tmp_path), pretrained_checkpoint=str(pretrained))
    config = replace(RunConfig(), checkpoint=checkpoint, islands=IslandsConfig(islands=2, island=1))
    initial = with_pretrained(config, notes.append).checkpoint
    assert (initial.load, initial.finetune, len(notes)) == (str(pretrained), True, 1)
    folder = tmp_path / "island_0"
    (folder / "iter_0000002").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    assert with_pretrained(config, notes.append) == config
    assert len(notes) == 1
