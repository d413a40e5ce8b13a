"""T5 on several ranks: compressors at every point, and ``pretrain_t5.py`` from data to a resumed checkpoint."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.convert import command as convert
from megatron.inference import generate_command
from megatron.planner import command as plan
from megatron.training import pretrain
from megatron.training.assembly import Engines
from megatron.training.replica_check import disagreements
from tests.support.cli import run_cli
from tests.support.corpus import tiny_bert_flags, tiny_t5_flags, write_sentences
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.tiny import T5, Trace, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

SCRIPT = "pretrain_t5.py"
Changes = dict[str, dict[str, Any]]
EIGHT_BITS = ["pp-forward=fixpoint,bits=8", "pp-backward=fixpoint,bits=8"]


def _changes(*specs: str, **parallel: Any) -> Changes:
    return {**T5, "parallel": parallel, "compression": {"compress": list(specs)}}


COMPRESSED: dict[str, Changes] = {
    "replicas": _changes(*EIGHT_BITS, "dp-grad=powersgd,rank=2", "embedding=fused", pipeline_model_parallel_size=2),
    "stages": _changes(
        "pp-forward=delta,predict=token",
        "pp-backward=lowrank,rank=2,error-feedback=lazy",
        "embedding=powersgd,rank=2",
        pipeline_model_parallel_size=4,
    ),
    "parts": _changes(
        *EIGHT_BITS,
        "tp-forward=fixpoint,bits=8",
        pipeline_model_parallel_size=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    ),
}


STEPS = 4


def _compressed() -> dict[str, tuple[Trace, list[str]]]:
    traces = {}
    for name, changes in COMPRESSED.items():
        engines = tiny_engines(changes)
        differences: list[str] = []

        def look(after: Engines, differences: list[str] = differences) -> None:
            differences.extend(disagreements(after))

        traces[name] = (tiny_train(engines, STEPS, after_step=look), differences)
    return traces


def test_compressors_at_every_point() -> None:
    ranks = run_ranks(4, _compressed)
    for traces in ranks:
        for name, (trace, differences) in traces.items():
            assert differences == [], name
            assert all(math.isfinite(value) for value in trace.losses), name
            assert trace.losses[-1] < trace.losses[0], name
            for point, raw in trace.raw_by_point.items():
                if name != "stages" and point in ("pp-forward", "pp-backward", "dp-grad", "tp-forward"):
                    assert trace.bytes_by_point[point] <= 0.6 * raw, (name, point)
    used = {name: {point for traces in ranks for point in traces[name][0].raw_by_point} for name in COMPRESSED}
    assert used["replicas"] >= {"pp-forward", "pp-backward", "dp-grad"}
    assert used["parts"] >= {"pp-forward", "pp-backward", "tp-forward"}
    # Activations in fp32 of a sample: between stages of the decoder those of both parts.
    (width, encoder, decoder), samples = (32 * 4, 16, 8), STEPS * 4
    sent = [traces["stages"][0].raw_by_point.get("pp-forward", 0) for traces in ranks]
    assert sent == [samples * width * length for length in (encoder, encoder, encoder + decoder, 0)]


def _bytes(sequence_parallel: bool) -> list[dict[str, float]]:
    """Bytes of both tensor-parallel points in a step of a sample, with one to three layers in the decoder."""
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    byte_counts = []
    for layers in (1, 2, 3):
        model = {**T5["model"], "num_layers": 1, "decoder_num_layers": layers}
        changes = {**T5, "model": model, "parallel": parallel, "training": {"global_batch_size": 1}}
        byte_counts.append(tiny_train(tiny_engines(changes), 1).raw_by_point)
    return byte_counts


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_encoders_output_is_exchanged_once(sequence_parallel: bool) -> None:
    """Another layer costs only its own tokens: three sums each way; or, of half as much each, six gathers and
    reduce-scatters forward and nine back, and the gradients of three norms and three biases that every rank has."""
    decoder_bytes = 32 * 4 * 8  # bytes of the decoder's tokens, and of a sum over two ranks
    forward, backward = (
        (3 * decoder_bytes, 9 * decoder_bytes // 2 + 9 * 32 * 4)
        if sequence_parallel
        else (3 * decoder_bytes, 3 * decoder_bytes)
    )
    for byte_counts in run_ranks(2, _bytes, sequence_parallel):
        for fewer, larger in pairwise(byte_counts):
            assert larger["tp-forward"] - fewer["tp-forward"] == forward
            assert larger["tp-backward"] - fewer["tp-backward"] == backward


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_sentences(tmp_path_factory.mktemp("data") / "tiny")


def _train(flags: list[str]) -> None:
    assert pretrain.main(flags, "t5") == 0


def _losses(path: Path) -> dict[int, tuple[float, float]]:
    return {event["iteration"]: (event["lm_loss"], event["grad_norm"]) for event in read_events(path)}


DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def saved(data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of two stages, each of two tensor-parallel ranks, and their log."""
    folder = tmp_path_factory.mktemp("saved")
    split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    flags = {"save": folder / "saved", "save_interval": 3, "log_json_file": folder / "log"}
    run_ranks(4, _train, tiny_t5_flags(data, **DROPOUT, **split, **flags), timeout=240, init=False)
    return folder / "saved", folder / "log"


def test_a_run_resumes_on_another_layout(data: tuple[Path, Path], saved: tuple[Path, Path], tmp_path: Path) -> None:
    """The checkpoint knows the lengths and the number of sentinels."""
    log = tmp_path / "log"
    from_checkpoint: dict[str, Any] = {"use_checkpoint_args": True, "decoder_seq_length": None, "vocab_extra_ids": None}
    resumed: dict[str, Any] = {"load": saved[0], "ckpt_step": 3, "log_json_file": log}
    flags = tiny_t5_flags(data, **DROPOUT, **from_checkpoint, **resumed, use_distributed_optimizer=True)
    run_ranks(2, _train, flags, timeout=240, init=False)
    before, after = _losses(saved[1]), _losses(log)
    assert sorted(after) == [4, 5, 6]
    for iteration, step in after.items():
        assert step == pytest.approx(before[iteration], rel=1e-4)


def test_a_compressed_run_resumes_exactly(data: tuple[Path, Path], tmp_path: Path) -> None:
    """With compressors' state, at both kinds of boundaries and of three holders of the embedding."""
    specs = ["pp-backward=lowrank,rank=2,error-feedback=lazy", "embedding=powersgd,rank=2", "pp-forward=delta"]
    split = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_split_rank": 1, "decoder_num_layers": 2}
    common: dict[str, Any] = {**DROPOUT, **split, "compress": specs, "sample_order": "fixed", "split": "1,0,0"}
    logs = [tmp_path / "whole", tmp_path / "rest"]
    for changes in ({"save": tmp_path / "saved", "save_interval": 3}, {"load": tmp_path / "saved", "ckpt_step": 3}):
        flags = tiny_t5_flags(data, **common, **changes, log_json_file=logs["load" in changes])
        run_ranks(3, _train, flags, timeout=240, init=False)
    losses, resumed_losses = _losses(logs[0]), _losses(logs[1])
    assert sorted(resumed_losses) == [4, 5, 6]
    assert resumed_losses == {iteration: losses[iteration] for iteration in resumed_losses}


def test_output_and_refusals_by_other_programs(
    data: tuple[Path, Path], saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_cli(1, [SCRIPT, *tiny_t5_flags(data, train_iters=2, eval_interval=2)]).check()
    line = r"^ iteration +2/ +2 \| .* \| lm loss: \S+ \| loss scale: 1.0 \|"
    assert re.search(line, done.stdout, re.MULTILINE), done.stdout
    line = r"^ validation loss at iteration 2 \| lm loss value: \S+ \| lm loss PPL: \S+ \|"
    assert re.search(line, done.stdout, re.MULTILINE), done.stdout
    folder = str(saved[0])
    (tmp_path / "run.yaml").write_text("model:\n  model_type: t5\n")
    refused = {
        "continue with pretrain_t5.py": lambda: pretrain.main(tiny_bert_flags(data, load=folder), "bert"),
        "which no other format supports": lambda: convert.main(["--load", folder, "--save", "x", "--to", "hf"]),
        "only gpt generates text": lambda: generate_command.main(["--load", folder]),
        "model_type t5 is not planned": lambda: plan.main(["--config", str(tmp_path / "run.yaml"), "--cluster", "c"]),
    }
    capsys.readouterr()
    for words, command in refused.items():
        assert command() == 2, words
        (error,) = capsys.readouterr().err.splitlines()[-1:]
        assert words in error
