"""The peers of the training benchmark, without a model to train."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import program, train
from benchmarks.train_sides import Shape, peer_step
from benchmarks.train_steps import process_step
from benchmarks.turns import SideError

SHAPE = Shape(1, 64, 8, 1, vocab=32)


class _Side:
    """A side whose steps take as many seconds as its arguments say."""

    built: ClassVar[list[tuple[str, str, bool]]] = []
    seconds: ClassVar = {("ours", False): 1.0, ("hugging-face", False): 1.5, ("hugging-face", True): 1.25}

    def __init__(self, name: str, build: partial[Any], device: str) -> None:
        del name, device
        named = inspect.signature(process_step).bind(*build.args, **build.keywords).arguments
        assert named["shape"] is SHAPE
        key = named["kind"], named.get("compiled", False)
        self.built.append((key[0], named["precision"], key[1]))
        self.took = self.seconds[key]

    def step(self) -> float:
        return self.took

    def close(self) -> int:
        return 2**30


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """Kind, precision and compilation of each side that was built."""
    monkeypatch.setattr(train, "Side", _Side)
    monkeypatch.setattr(_Side, "built", [])
    return _Side.built


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peers_are_eager_and_compiled_at_the_same_precision(precision: str, built: list[tuple[str, str, bool]]) -> None:
    row = train.compare(SHAPE, precision, 1, 3, 1e9, "cpu", compiled=True)
    assert built == [
        ("ours", precision, False),
        ("hugging-face", precision, False),
        ("hugging-face", precision, True),
    ]
    assert (row["ratio"], row["compiled_ratio"]) == (1.5, 1.25)
    line = train.SINGLE.line(row)
    assert line.startswith(f"| L1 h64 s8 b1 | {precision} | 8 | 5 | 1.50 | 6 | 1.25 |")
    assert line.endswith("| 1.00 GiB | 1.00 GiB | 1.00 GiB |")


def test_compiled_peers_can_be_left_out(built: list[tuple[str, str, bool]]) -> None:
    row = train.compare(SHAPE, "bf16", 1, 3, 1e9, "cpu", compiled=False)
    assert built == [("ours", "bf16", False), ("hugging-face", "bf16", False)]
    head = train.SINGLE.filled([row]).head()
    assert "Hugging Face tokens/s" in head
    assert "compiled" not in head


def test_a_compiled_peer_trains_what_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compile_model(model: torch.nn.Module) -> Any:
        calls.append("compiled")
        model.register_forward_hook(lambda *_: calls.append("trained"))
        return model

    monkeypatch.setattr(torch, "compile", compile_model)
    peer_step("nanogpt", SHAPE, "fp32", "cpu", compiled=False)()
    assert calls == []
    peer_step("nanogpt", SHAPE, "fp32", "cpu", compiled=True)()
    assert calls == ["compiled", "trained"]


def test_the_program_is_measured_beside_an_eager_and_a_compiled_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(command: list[str], iterations: int, threads: int) -> float:
        del iterations, threads
        return 1.0 if command[0] == "pretrain_gpt.py" else 1.25 if "compiled" in command else 1.5

    monkeypatch.setattr(program, "seconds", seconds)
    row = program.compare_programs(SHAPE, 1, 2, 1, compiled=True)
    assert (row["ratio"], row["compiled_ratio"]) == (1.5, 1.25)
    assert "compiled_ratio" not in program.compare_programs(SHAPE, 1, 2, 1, compiled=False)


@pytest.mark.parametrize("flag", [[], ["--no-compiled"]])
def test_the_flag_decides(flag: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[bool] = []

    def measure(*_: Any, compiled: bool) -> dict[str, Any]:
        measured.append(compiled)
        raise SideError("hugging-face compiled", "no C++ compiler")

    monkeypatch.setattr(train, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["train", *flag, "--out", str(tmp_path / "x.json")])
    assert train.main() == 1
    assert measured == [not flag]


def test_a_peer_that_cannot_be_compiled_is_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any, **__: Any) -> dict[str, Any]:
        raise SideError("hugging-face compiled", "no C++ compiler")

    monkeypatch.setattr(train, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path / "x.json")])
    assert train.main() == 1
    error = capsys.readouterr().err
    assert error == "error: hugging-face compiled: no C++ compiler; --no-compiled leaves compiled peers out\n"
