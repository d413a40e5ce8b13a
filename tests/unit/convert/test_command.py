"""The converter's command line: destinations, interruptions, and conflicting flags."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.base.atomic import hold_lock
from megatron.checkpoint.model_state import MAIN
from megatron.checkpoint.stored import StoredTensors
from megatron.convert import command
from megatron.convert.command import main
from megatron.training import pretrain
from tests.support.cli import REPO
from tests.support.corpus import tiny_flags, write_documents
from tests.support.disk import largest_file
from tests.unit.convert.support import convert, refusal, saved_model

FORMATS = ("hf", "megatron-cc", "classic")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("saved") / "ours", {})


def test_a_checkpoint_without_a_tracker_loads_as_in_training(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "ours")
    (tmp_path / "ours" / "latest_checkpointed_iteration.txt").unlink()
    convert(tmp_path / "ours", tmp_path / "hf", "hf")
    assert (tmp_path / "hf" / "config.json").exists()


def test_fp32_weights_come_from_the_optimizer_if_it_has_them(tmp_path: Path) -> None:
    """A run in bf16 rounds its weights for each forward pass, and continues from the fp32 ones."""
    root = tmp_path / "ours"
    flags = tiny_flags(write_documents(tmp_path / "tiny"), train_iters=2, bf16=True, save=root, lr=1e-4)
    assert pretrain.main(flags) == 0
    expected = StoredTensors(root, 2).read(f"{MAIN}layers.1.mlp.dense_h_to_4h.weight").t()
    assert not torch.equal(expected, expected.bfloat16())
    for dtype in (None, "fp32", "bf16"):
        assert main(["--load", str(root), "--save", str(tmp_path / f"{dtype}"), "--to", "hf", "--no-tokenizer",
                     *(["--dtype", dtype] if dtype else [])]) == 0  # fmt: skip
        exported = load_file(tmp_path / f"{dtype}" / "model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
        assert torch.equal(exported, expected if dtype == "fp32" else expected.bfloat16())


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_weights_that_are_not_finite_are_refused(
    value: float, to: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN and infinities of the source, and overflow in the requested precision."""
    convert(saved, tmp_path / "hf", "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.h.0.ln_1.weight"][3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    line = refusal(capsys, tmp_path / "hf", tmp_path / "out", to, "--dtype", "fp16")
    assert "input_layernorm.weight holds infinite or NaN values" in line
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    if value == 1e6:
        convert(tmp_path / "hf", tmp_path / "out", to, "--dtype", "fp32")


class _Bar:
    """Progress bar that sends this process a signal after a few tensors."""

    number = signal.SIGINT

    def __init__(self, **_: Any) -> None:
        self.calls = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, nbytes: int) -> None:
        self.calls += 1
        if self.calls == 5:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """A shell child's signal handlers, even if the tests run under nohup or in the background."""
    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.usefixtures("usual_handlers")
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_conversion_leaves_nothing(
    to: str,
    number: signal.Signals,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--load", str(saved), "--save", str(tmp_path / "out"), "--to", to]
    with monkeypatch.context() as patched:
        patched.setattr(_Bar, "number", number)
        patched.setattr(command, "tqdm", _Bar)
        assert main(words) == 130
    assert capsys.readouterr().err == "ckpt_convert: interrupted; nothing was written\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert main(words) == 0


def test_nohup_stays_in_force(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Bar, "number", signal.SIGHUP)
    monkeypatch.setattr(command, "tqdm", _Bar)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        convert(saved, tmp_path / "out", "hf")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_a_killed_conversion_can_be_repeated(to: str, saved: Path, tmp_path: Path) -> None:
    """Its leftovers are removed; files that another process, here or on another machine, holds and writes are not."""
    pid = os.getpid()
    stale, mine, foreign = (tmp_path / f".out.{number}.partial" for number in (pid + 1, pid, pid + 2))
    for folder in (stale, mine, foreign):
        (folder / "iter_0000007").mkdir(parents=True)
    with hold_lock(foreign):
        convert(saved, tmp_path / "out", to)
    assert {path.name for path in tmp_path.iterdir()} == {"out", foreign.name}


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_kill_leaves_the_folder_free(saved: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a conversion to our own format, then the same command."""
    program = (
        "import signal, sys; from tests.unit.convert.test_command import _Bar;"
        "from megatron.convert import command;"
        "_Bar.number = signal.SIGKILL; command.tqdm = _Bar; command.main(sys.argv[1:])"
    )
    words = ["--load", str(saved), "--save", str(tmp_path / "out"), "--to", "megatron-cc"]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=REPO)
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("to", FORMATS)
def test_save_can_be_an_empty_folder_or_a_link_to_one(to: str, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    convert(saved, tmp_path / "link", to)
    assert (tmp_path / "link").is_symlink()
    assert any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("to", FORMATS)
def test_save_must_not_name_a_file(to: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file"
    assert f"--save {path}: is not a folder" in refusal(capsys, saved, path, to)
    assert f"--save {path}/below: Not a directory" in refusal(capsys, saved, path / "below", to)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("nbytes", [500, 50_000])
def test_a_full_disk_is_one_line(
    to: str, nbytes: int, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(nbytes):
        line = refusal(capsys, saved, tmp_path / "out", to)
    assert str(tmp_path / "out") in line
    assert ".partial" not in line
    assert not list(tmp_path.iterdir())


def test_an_unwritable_classic_archive_is_one_line(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:820] . PytorchStreamWriter failed writing file data/0")

    monkeypatch.setattr(torch, "save", full)
    line = refusal(capsys, saved, tmp_path / "out", "classic")
    assert line.endswith(f"--save {tmp_path / 'out'}: the file cannot be written; is the disk full?")


def test_flags_that_have_no_effect_are_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(saved, tmp_path / "hf", "hf")
    convert(saved, tmp_path / "classic", "classic")
    ranks = tmp_path / "classic" / "iter_0000007"
    for load, flags, message in (
        (saved, ["--vocab-size", "7"], "--vocab-size 7: only classic files need it"),
        (tmp_path / "hf", ["--vocab-size", "7"], "--vocab-size 7: only classic files need it"),
        (tmp_path / "hf", ["--iteration", "7"], "is a Hugging Face folder, which has none"),
        (saved, ["--target-tensor-parallel-size", "2"], "only --to classic splits a model"),
        (saved, ["--iteration", "-3"], "--iteration -3: iterations count from 0"),
        (ranks, ["--iteration", "3"], f"--iteration 3: {ranks} is itself a checkpoint"),
        (ranks.parent, ["--iteration", "3"], "has no such checkpoint; it has iter_0000007"),
    ):
        assert message in refusal(capsys, load, tmp_path / "x", "hf", *flags)


def test_another_iteration_is_advised_by_the_flag(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, tmp_path / "two")
    shutil.copytree(saved / "iter_0000007", tmp_path / "two" / "iter_0000003")
    line = refusal(capsys, tmp_path / "two", tmp_path / "x", "hf", "--iteration", "5")
    assert line.endswith(
        "iter_0000005 does not exist; complete checkpoints, newest first: 7, 3; name one of them (--iteration 7)"
    )


@pytest.mark.parametrize(("flags", "to"), [([], "classic"), (["--to", "hf"], "hf"), (["--to=hf"], "hf")])
def test_merging_takes_every_form_of_to(
    flags: list[str], to: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--load", str(saved), "--save", str(tmp_path / "out"), *flags]
    monkeypatch.setattr(sys, "argv", ["merge_mp_partitions.py", *words])
    monkeypatch.syspath_prepend(REPO / "tools")  # as Python does
    monkeypatch.setattr("megatron.base.start.end_program", sys.exit)  # which would end this process, tests and all
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(REPO / "tools" / "merge_mp_partitions.py"), run_name="__main__")
    assert caught.value.code == 0
    assert (tmp_path / "out" / "config.json").is_file() == (to == "hf")
    assert (tmp_path / "out" / "iter_0000007" / "mp_rank_00").is_dir() == (to == "classic")
