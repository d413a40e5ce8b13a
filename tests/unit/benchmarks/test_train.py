"""The training benchmark: its comparison, its peers and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import comparison, train
from benchmarks.comparison import StepComparison
from benchmarks.models import HuggingFaceLoss, PlainGPT, Shape, cast_experts, peer_training
from benchmarks.report import Table
from benchmarks.rows import RowFile, RowLog
from benchmarks.steps import process_step, run_config
from tests.support.bench_sides import InProcessSide, ScriptedSide

SHAPE = Shape(1, 64, 8, 1, vocab=32)
GPT = Shape(2, 64, 16, 2, vocab=100)
MIXTRAL = Shape(2, 64, 16, 2, vocab=100, llama=True, ffn=128, groups=1, experts=4)


class EventLog(RowLog):
    """A log that also adds rows to the events of sides."""

    def row(self, key: str, **cells: Any) -> None:
        super().row(key, **cells)
        ScriptedSide.events.append(f"row {key.split(', ')[-1]}")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StepComparison:
    """A comparison of sides with scripted times, and a peer that fails."""
    monkeypatch.setattr(comparison, "Side", ScriptedSide)
    monkeypatch.setattr(ScriptedSide, "events", [])
    monkeypatch.setattr(ScriptedSide, "builds", [])
    monkeypatch.setattr(ScriptedSide, "seconds", {"ours": 1.0, "hugging-face": 2.0})
    return StepComparison(SHAPE, "bf16", 1, "cpu", 1e9, EventLog(tmp_path / "rows.jsonl"), turns=3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_peer_is_compared_at_equal_precision(precision: str, scripted: StepComparison) -> None:
    replace(scripted, precision=precision).measure(["hugging-face"])
    sides = [("ours", SHAPE, precision), ("hugging-face", SHAPE, precision)]
    assert [arguments[:3] for arguments in ScriptedSide.builds] == sides
    (row,) = RowFile().read(scripted.log.path).rows.values()
    text = Table(*comparison.COLUMNS).line(row)
    assert text.startswith(f"| L1 h64 s8 b1 | {precision} | hugging-face | 8 | 4 | 2.00 |")
    assert text.endswith("| 1.00 | 2.00 |")
    assert row["of_limit"] == pytest.approx(SHAPE.flops() / 1e9)


def test_our_row_is_recorded_before_a_peer_starts(scripted: StepComparison) -> None:
    """And again with the turns beside the peer; a failing peer costs only its own row."""
    scripted.measure(["ours", "nanogpt", "hugging-face"])
    last = ["hugging-face starts", "hugging-face ends", "row ours", "row hugging-face"]
    assert ScriptedSide.events == ["ours starts", "row ours", "nanogpt starts", *last]
    file = RowFile().read(scripted.log.path)
    assert file.failures == {scripted.key("nanogpt"): "nanogpt: out of memory"}
    assert set(file.rows) == {scripted.key("ours"), scripted.key("hugging-face")}


def test_no_row_remains_when_our_side_fails(scripted: StepComparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedSide, "seconds", {"hugging-face": 2.0})
    scripted.measure(["ours", "hugging-face"])
    file = RowFile().read(scripted.log.path)
    assert file.rows == {}
    assert file.failures == {scripted.key(name): "ours: out of memory" for name in ("ours", "hugging-face")}


def test_our_row_remains_when_our_side_fails_beside_a_peer(
    scripted: StepComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(log: RowLog, key: str) -> None:
        if key == scripted.key("hugging-face"):
            ScriptedSide.seconds.pop("ours", None)

    monkeypatch.setattr(EventLog, "begin", begin)
    scripted.measure(["ours", "hugging-face"])
    file = RowFile().read(scripted.log.path)
    assert list(file.rows) == [scripted.key("ours")]
    assert file.failures == {scripted.key("hugging-face"): "ours: out of memory"}


def test_the_benchmark_measures_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "Side", InProcessSide)
    threads = torch.get_num_threads()
    try:
        words = ["--quick", "--no-compiled", "--threads", "1", "--out", str(tmp_path)]
        assert train.main(words) == 0
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert "compiled" not in output
    record = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["shape"], row["precision"]) for row in record["rows"]] == [
        (shape, precision)
        for shape in ("L2 h128 s32 b2", "Mixtral 4 x L2 h128 s32 b2")
        for precision in ("fp32", "bf16")
    ]
    for row in record["rows"]:
        assert row["ratio"] > 0
        assert f"| {row['ratio']:.2f} |" in output


def test_a_peer_that_cannot_be_compiled_is_reported_with_the_fix(
    scripted: StepComparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--quick", "--only", "steps", "--threads", "1", "--out", str(tmp_path)]) == 1
    error = "error: hugging-face compiled: out of memory; --no-compiled leaves compiled peers out\n"
    assert capsys.readouterr().err == error
    assert train.main(["--quick", "--no-compiled", "--threads", "1", "--out", str(tmp_path / "x.json")]) == 0


def test_a_compiled_peer_trains_the_model_that_torch_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compile_model(model: torch.nn.Module) -> Any:
        calls.append("compiled")
        model.register_forward_hook(lambda *_: calls.append("trained"))
        return model

    monkeypatch.setattr(torch, "compile", compile_model)
    process_step("nanogpt", SHAPE, "fp32", 1)()
    assert calls == []
    process_step("nanogpt compiled", SHAPE, "fp32", 1)()
    assert calls == ["compiled", "trained"]


def test_expert_weights_of_a_peer_are_bf16_on_a_gpu() -> None:
    """And only there; a step with them works."""
    for precision, device in (("bf16", "cpu"), ("fp32", "cuda"), ("bf16", "cuda")):
        model = HuggingFaceLoss(MIXTRAL)
        cast_experts(model, precision, device)
        halves = {name.split(".")[-1] for name, x in model.named_parameters() if x.dtype == torch.bfloat16}
        assert halves == ({"gate_up_proj", "down_proj"} if (precision, device) == ("bf16", "cuda") else set())
    with mock.patch("benchmarks.models.HuggingFaceLoss", return_value=model):
        train_once = peer_training("hugging-face", MIXTRAL, "bf16", "cpu", compiled=False)
    tokens, labels = (torch.randint(0, 100, (2, 16)) for _ in range(2))
    losses = [float(train_once(tokens, labels)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_the_plain_model_is_a_gpt2() -> None:
    """It has as many parameters as Hugging Face's of the same vocabulary, and its loss is causal."""
    torch.manual_seed(0)
    model, theirs = PlainGPT(GPT, 100), HuggingFaceLoss(GPT)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    tokens, labels = (torch.randint(0, 100, (2, 16)) for _ in range(2))
    assert float(model(tokens, labels).detach()) == pytest.approx(4.6, abs=0.1)
    masked_labels, changed_tokens = labels.clone(), tokens.clone()
    masked_labels[:, 8:], changed_tokens[:, 8:] = -100, 1
    torch.testing.assert_close(model(tokens, masked_labels), model(changed_tokens, masked_labels))
    assert not torch.equal(model(tokens, labels), model(changed_tokens, labels))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 256, 256, 8),
        Shape(2, 256, 128, 2, vocab=128, llama=True, ffn=896, groups=2),
        Shape(4, 512, 512, 2, vocab=32000, llama=True, ffn=1792, groups=4, experts=8),
    ],
    ids=["gpt-2", "llama", "mixtral"],
)
def test_flops_of_a_step(shape: Shape) -> None:
    """Six for each weight in use and token, and those of causal attention; two experts of each layer are in use."""
    h, tokens = shape.hidden, shape.batch * shape.seq
    keys_and_values = 2 * (shape.groups or shape.heads) * (h // shape.heads)
    feed_forward = (3 if shape.llama else 2) * (shape.ffn or 4 * h) * (2 if shape.experts else 1)
    weights = shape.layers * h * (2 * h + keys_and_values + feed_forward + shape.experts) + h * shape.vocab
    attention = 3 * 4 * shape.layers * tokens * h * (shape.seq + 1) / 2
    assert shape.flops() == pytest.approx(6 * tokens * weights + attention, rel=1e-3)


@pytest.mark.parametrize("shape", [*train.SHAPES["experts"], GPT, MIXTRAL], ids=lambda shape: shape.name)
def test_shapes_resolve(shape: Shape) -> None:
    config = run_config(shape, "bf16", {}, shape.batch, 1, 128)
    assert config.training.global_batch_size == shape.samples
