"""BERT on several ranks: compressors at every point, and ``pretrain_bert.py`` from data to a resumed checkpoint."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.training import pretrain
from megatron.training.replica_check import disagreements
from tests.support.cli import run_cli
from tests.support.corpus import tiny_bert_flags, tiny_flags, write_documents, write_sentences
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

SCRIPT = "pretrain_bert.py"
COMPRESSED: dict[str, dict[str, Any]] = {
    "model": {"model_type": "bert"},
    "parallel": {"pipeline_model_parallel_size": 2},
    "compression": {
        "compress": [
            "pp-forward=fixpoint,bits=8",
            "pp-backward=fixpoint,bits=8",
            "dp-grad=powersgd,rank=2",
            "embedding=fused",
        ]
    },
}


def _compressed() -> tuple[Trace, list[str]]:
    engines = tiny_engines(COMPRESSED)
    differences: list[str] = []
    trace = tiny_train(engines, 6, after_step=lambda after: differences.extend(disagreements(after)))
    return trace, differences


def test_compressors_at_every_point() -> None:
    for trace, differences in run_ranks(4, _compressed):
        assert differences == []
        assert all(math.isfinite(value) for step in trace.named for value in step.values())
        assert trace.losses[-1] < trace.losses[0]
        for point in ("pp-forward", "pp-backward", "dp-grad"):
            assert trace.bytes_by_point.get(point, 0) <= 0.6 * trace.raw_by_point.get(point, 0), point


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_sentences(tmp_path_factory.mktemp("data") / "tiny")


def _train(flags: list[str]) -> None:
    assert pretrain.main(flags, "bert") == 0


def _losses(path: Path) -> dict[int, tuple[float, float, float]]:
    events = read_events(path)
    return {event["iteration"]: (event["lm_loss"], event["sop_loss"], event["grad_norm"]) for event in events}


SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}


def test_a_run_resumes_exactly_and_on_another_layout(data: tuple[Path, Path], tmp_path: Path) -> None:
    common: dict[str, Any] = {"train_iters": 6, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    saved, logs = tmp_path / "saved", {name: tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "other")}
    stages: list[tuple[int, dict[str, Any]]] = [
        (4, {**SPLIT, "log_json_file": logs["whole"]}),
        (4, {**SPLIT, "save": saved, "exit_interval": 3, "log_json_file": logs["parts"]}),
        (4, {**SPLIT, "load": saved, "log_json_file": logs["parts"]}),
        (2, {"use_distributed_optimizer": True, "load": saved, "log_json_file": logs["other"]}),
    ]
    for world_size, changes in stages:
        flags = tiny_bert_flags(data, **common, **changes)
        run_ranks(world_size, _train, flags, timeout=240, init=False)
    losses = _losses(logs["whole"])
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert _losses(logs["parts"]) == losses
    other = _losses(logs["other"])
    assert sorted(other) == [4, 5, 6]
    for iteration, step in other.items():
        assert step == pytest.approx(losses[iteration], rel=1e-4)


def test_output_and_refusals(data: tuple[Path, Path], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    flags = tiny_bert_flags(data, train_iters=2, save=saved, eval_interval=2)
    done = run_cli(1, [SCRIPT, *flags]).check()
    line = r"^ iteration +2/ +2 \| .* \| lm loss: \S+ \| sop loss: \S+ \| loss scale: 1.0 \|"
    assert re.search(line, done.stdout, re.MULTILINE), done.stdout
    line = r"^ validation loss at iteration 2 \| lm loss value: \S+ \| lm loss PPL: \S+ \| sop loss value: \S+ \|"
    assert re.search(line, done.stdout, re.MULTILINE), done.stdout
    prefix = write_documents(tmp_path / "texts", documents=10)
    for extra_flags in ([], ["--finetune", "--use-checkpoint-args"]):
        refused = run_cli(1, ["pretrain_gpt.py", *tiny_flags(prefix, load=saved), *extra_flags])
        assert refused.returncode == 2
        (error,) = refused.stderr.splitlines()[-1:]
        assert error.endswith(f"--load {saved} holds a model of type bert, not gpt; continue with pretrain_bert.py")
    headless = run_cli(1, [SCRIPT, *tiny_bert_flags(data, train_iters=1, bert_no_binary_head=True)]).check()
    assert "lm loss: " in headless.stdout
    assert "sop loss" not in headless.stdout


def test_a_run_with_other_heads_is_refused_by_flag(
    data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    assert pretrain.main(tiny_bert_flags(data, train_iters=1, save=saved), "bert") == 0
    for changes, flag in (
        ({"load": saved, "bert_no_binary_head": True}, "; compare --bert-no-binary-head and --num-tokentypes with its"),
        ({"load": saved, "num_tokentypes": 3}, "; compare --num-tokentypes with its config.yaml, or pass --use-ch"),
        (
            {"load": saved, "hidden_size": 32},
            "; compare --hidden-size, --ffn-hidden-size, --kv-channels and the vocabulary with its",
        ),
        ({"tokenizer_type": None, "vocab_file": None, "vocab_size": 55}, "error: BERT masks words: give --tokenizer"),
    ):
        capsys.readouterr()
        assert pretrain.main(tiny_bert_flags(data, **changes), "bert") == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert flag in line
