"""The planner's command line."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron.config.run import RunConfig
from megatron.convert.model import tensors_of
from megatron.models.stages import padded_vocab_size
from megatron.parallel.pipeline import schedule_plot
from megatron.planner import report
from megatron.planner.choice import make_choice
from megatron.planner.cluster import LinkSpec, format_cluster, read_cluster
from megatron.planner.command import main
from megatron.planner.dry_run import CostTally
from tests.support.disk import largest_file
from tests.support.svg import KINDS, read_rows, read_texts
from tests.unit.planner.support import CLUSTER, VOCAB, predictor_of, small_run, write_files

pytestmark = pytest.mark.slow
Capture = pytest.CaptureFixture[str]
TWO_LAYERS = {"num_layers": 2}  # for a quick search


def _files(folder: Path, specs: tuple[str, ...] = ()) -> list[str]:
    stages = {"pipeline_model_parallel_size": 2}
    return write_files(folder, small_run(specs=specs, model=TWO_LAYERS, parallel=stages))


def test_a_run_is_predicted_with_faster_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_files(tmp_path), "--specs", "", "--specs", "dp-grad=fixpoint,bits=4", "--top", "2"]
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    output = capsys.readouterr().out
    assert "the run as it is, on c:" in output
    assert "tp 1, pp 2, dp 4, 8 micro-batches of 1, 1f1b" in output
    assert "dp-grad: " in output
    assert "the fastest of each of the fastest layouts, of " in output
    assert "--tensor-model-parallel-size" in output
    assert "the runner-up is " in output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert len(written) == 3
    assert written[1]["seconds"] <= written[2]["seconds"]
    assert {"seconds", "parts", "memory", "sent", "mfu", "choice"} <= written[0].keys()


def test_the_schedule_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the run as it is without a search, otherwise of the fastest run; a long step with fewer micro-batches."""
    words, picture = _files(tmp_path), tmp_path / "schedule.svg"
    options = ["--draw-schedule", str(picture)]
    assert main([*words, *options, "--no-search", "--json", str(tmp_path / "plan.json")]) == 0
    assert f"the schedule is drawn in {picture}" in capsys.readouterr().out
    texts, (plan,) = read_texts(picture), json.loads((tmp_path / "plan.json").read_text())
    assert "tp 1, pp 2, dp 4, 8 micro-batches of 1, 1f1b, on c" in texts
    assert [[KINDS[box.color] for box in row].count("forward") for row in read_rows(picture)] == [8, 8]
    assert any(text.startswith(f"predicted: step {1000 * plan['seconds']:.3g} ms, passes ") for text in texts)
    assert main([*words, *options, "--specs", "", "--json", str(tmp_path / "plan.json")]) == 0
    best = json.loads((tmp_path / "plan.json").read_text())[1]["choice"]
    layout = f"tp {best['tp']}, pp {best['pp']}, dp {best['dp']}, {best['micro_batches']} micro-batch"
    assert any(text.startswith(layout) for text in read_texts(picture))
    assert main([*words, "--draw-schedule", str(tmp_path / "schedule.gif")]) == 2
    assert "plan: error: --draw-schedule " in capsys.readouterr().err


def test_auto_is_planned_and_drawn(tmp_path: Path) -> None:
    auto = small_run(parallel={"pipeline_model_parallel_size": 2, "pipeline_schedule": "auto"})
    words, picture = write_files(tmp_path, auto), tmp_path / "schedule.svg"
    options = ["--no-search", "--draw-schedule", str(picture), "--json", str(tmp_path / "plan.json")]
    assert main([*words, *options]) == 0
    (plan,) = json.loads((tmp_path / "plan.json").read_text())
    assert plan["choice"]["schedule"] == "auto"
    assert "tp 1, pp 2, dp 4, 8 micro-batches of 1, auto, on c" in read_texts(picture)
    assert [[KINDS[box.color] for box in row].count("forward") for row in read_rows(picture)] == [8, 8]


def test_a_pipeline_without_a_flush_is_drawn_with_its_weight_passes(tmp_path: Path) -> None:
    parallel = {"pipeline_model_parallel_size": 2, "delay": 1, "no_pipeline_flush": True}
    picture = tmp_path / "schedule.svg"
    words = write_files(tmp_path, small_run(parallel=parallel))
    assert main([*words, "--no-search", "--draw-schedule", str(picture)]) == 0
    assert "drawn with a flush before and after the step" in " ".join(read_texts(picture))
    assert [[KINDS[box.color] for box in row].count("weight") for row in read_rows(picture)] == [0, 8]


def test_a_long_step_is_drawn_with_fewer_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_PASSES", 24)
    for chunks, count, drawn in ((1, 8, 6), (2, 8, 2)):
        parallel = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": chunks}
        words = write_files(
            tmp_path, small_run(parallel=parallel if chunks > 1 else {"pipeline_model_parallel_size": 2})
        )
        picture = tmp_path / "schedule.svg"
        assert main([*words, "--no-search", "--draw-schedule", str(picture)]) == 0
        assert f"drawn with {drawn} of {count} micro-batches" in read_texts(picture)
        assert [len(row) for row in read_rows(picture)] == [2 * drawn * chunks] * 2


def test_too_many_stages_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_line: Callable[[], str]
) -> None:
    monkeypatch.setattr(schedule_plot, "MAX_RANKS", 1)
    words = [*_files(tmp_path), "--no-search", "--draw-schedule", str(tmp_path / "s.svg")]
    assert main(words) == 2
    assert "--draw-schedule: 32 passes on 2 pipeline ranks are too many for a picture" in error_line()


def test_a_note_says_that_the_vocabulary_is_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary of another size moves another number of bytes."""
    words = [*_files(tmp_path), "--no-search"]
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    missing = {name: str(tmp_path / name) for name in ("vocab_file", "merge_file")}
    content["tokenizer"] = {"tokenizer_type": "GPT2BPETokenizer", **missing}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(words) == 0
    note, *_ = capsys.readouterr().out.splitlines()
    assert note.startswith("note: ")
    assert note.endswith("GPT-2's 50,257 entries are assumed; --vocab-size gives another number")
    assert missing["vocab_file"] in note
    assert main([*words, "--vocab-size", "3000"]) == 0
    assert "note: " not in capsys.readouterr().out


def test_the_vocabulary_size_replaces_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_files(tmp_path), "--no-search", "--json", str(tmp_path / "plan.json")]

    def planned_bytes(*options: str) -> object:
        assert main([*words, *options]) == 0
        (plan,) = json.loads((tmp_path / "plan.json").read_text())
        return plan["sent"], plan["memory"]

    expected = planned_bytes("--vocab-size", "3000")
    assert expected != planned_bytes("--vocab-size", str(VOCAB))
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    del content["tokenizer"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(words) == 2
    message = "plan: error: not given but required: --tokenizer-type (or --vocab-size); add it\n"
    assert capsys.readouterr().err == message
    assert planned_bytes("--vocab-size", "3000") == expected


def _tokens_per_s(row: str) -> float:
    return float(row.split()[1].replace(",", ""))


def test_a_single_node_is_compared_with_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan_on(**changes: Any) -> str:
        words = write_files(tmp_path, small_run(model=TWO_LAYERS), replace(CLUSTER, **changes))
        assert main([*words, "--specs", ""]) == 0
        return capsys.readouterr().out

    output = plan_on(across=LinkSpec(0.01, 1000.0))
    header = re.search(r"one node alone, with the same global batch: ([\d.]+) x as fast as all 8 devices:", output)
    assert header is not None
    assert output[header.end() :].startswith(" leave")
    rows = output[header.end() :].splitlines()
    assert re.search(r"tp \d, pp \d, dp \d", rows[2]) is not None
    assert np.prod([int(n) for n in re.findall(r"(?:tp|pp|dp) (\d)", rows[2])]) == 4
    fastest = output[output.index("the fastest of each") :].splitlines()[2]
    assert float(header[1]) == pytest.approx(_tokens_per_s(rows[2]) / _tokens_per_s(fastest), rel=0.01)
    output = plan_on(across=LinkSpec(4000.0, 0.1))
    assert re.search(r"one node alone, .*: all 8 devices are 1\.\d\d x as fast", output) is not None
    assert "one node alone" not in plan_on(gpus=4)


def test_compressors_give_a_note_on_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_files(tmp_path, ("pp-forward=fixpoint,bits=4",)), "--no-search"]
    assert main([*words, "--gpus", "4"]) == 0
    output = capsys.readouterr().out
    assert "  loss    these compressors change the loss" in output
    assert "tp 1, pp 2, dp 2" in output
    assert "pp-forward=fixpoint,bits=4" in output
    assert "fastest" not in output
    assert main([*_files(tmp_path), "--no-search"]) == 0
    assert "  loss  " not in capsys.readouterr().out


def test_missing_rates_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_files(tmp_path), "--no-search"]
    file = tmp_path / "cluster.yaml"
    file.write_text("gpus: 8\ngpus_per_node: 4\n")
    assert main(words) == 2
    assert f"{file}: no device; add device: {{name: ..., peak_tflops: ..." in capsys.readouterr().err
    file.write_text("gpus: 8\ngpus_per_node: 4\ndevice: {peak_tflops: 100, op_us: 2}\ninside: {gbit_per_s: 5}\n")
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"note: {file} lacks some rates; these defaults are assumed: device efficiency 0.6, device memory_gib 40, "
        "device memory_gbyte_per_s 1400, inside latency_us 10, across gbit_per_s 200, across latency_us 8"
    )
    assert main([*_files(tmp_path), "--no-search"]) == 0
    assert "are assumed" not in capsys.readouterr().out


def test_a_run_on_gpus_is_planned_without_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(config.read_text().replace("distributed_backend: gloo", "distributed_backend: nccl"))
    assert "nccl" in config.read_text()
    assert main([*words, "--top", "1", "--specs", ""]) == 0
    assert "the fastest of each of the fastest layouts, of " in capsys.readouterr().out


def test_the_search_includes_the_runs_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A few large operations are faster than many small ones, so the run's micro-batch is its layout's best.
    sizes = {"tensor_model_parallel_size": 4}
    run = small_run(model=TWO_LAYERS, training={"micro_batch_size": 32, "global_batch_size": 64}, parallel=sizes)
    words = write_files(tmp_path, run)
    assert main([*words, "--specs", "", "--top", "1000", "--json", str(tmp_path / "plan.json")]) == 0
    planned_run, *candidates = json.loads((tmp_path / "plan.json").read_text())
    assert candidates[0]["seconds"] <= planned_run["seconds"]
    (same_layout,) = (plan for plan in candidates if (plan["choice"]["tp"], plan["choice"]["pp"]) == (4, 1))
    assert same_layout["choice"]["micro_batch"] == 32


def test_compressors_are_chosen_for_the_runs_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a flag, or by the run's own configuration; what is written repeats the choice."""
    words, best = _files(tmp_path), tmp_path / "best.yaml"
    slow = replace(CLUSTER, gpus_per_node=1, across=LinkSpec(0.05, 20.0))
    (tmp_path / "cluster.yaml").write_text(format_cluster(slow))
    options = ["--max-loss-increase", "5%", "--write", str(best), "--json", str(tmp_path / "plan.json")]
    assert main([*words, "--compress", "auto", *options]) == 0
    output = capsys.readouterr().out
    before, after = json.loads((tmp_path / "plan.json").read_text())
    assert after["seconds"] < before["seconds"]
    assert before["choice"]["specs"] == []
    assert f"the same by hand: {' '.join(f'--compress {spec}' for spec in after['choice']['specs'])}" in output
    assert "the fastest of each" not in output
    assert RunConfig.from_yaml(best.read_text()).compression.compress == after["choice"]["specs"]
    small_budget = small_run(specs=("auto",), model=TWO_LAYERS, parallel={"pipeline_model_parallel_size": 2})
    (tmp_path / "run.yaml").write_text(small_budget.to_yaml())
    assert main(words) == 0
    assert "(--max-loss-increase 0.5)" in capsys.readouterr().out


def test_the_choice_of_compressors_is_compared_with_one_node_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _files(tmp_path)
    for gpus_per_node, count in ((CLUSTER.gpus // 2, 1), (CLUSTER.gpus, 0)):
        cluster = replace(CLUSTER, gpus_per_node=gpus_per_node, across=LinkSpec(0.05, 20.0))
        (tmp_path / "cluster.yaml").write_text(format_cluster(cluster))
        assert main([*words, "--compress", "auto"]) == 0
        assert capsys.readouterr().out.count("\none node alone, with the same global batch: ") == count


def test_a_run_that_does_not_fit_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path)
    (tmp_path / "cluster.yaml").write_text("gpus: 8\ndevice: {memory_gib: 0.0001}\n")
    assert main([*words, "--no-search"]) == 0
    assert "it does not fit" in capsys.readouterr().out


def test_measurements_are_written_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path, ("dp-grad=powersgd,rank=2",))
    assert main([*words, "--measure", "--no-search"]) == 0
    measured = read_cluster(tmp_path / "cluster.yaml")
    assert (measured.gpus, measured.gpus_per_node, measured.across) == (8, 4, CLUSTER.across)
    assert measured.device.peak_tflops != CLUSTER.device.peak_tflops
    assert measured.device.memory_gib == CLUSTER.device.memory_gib
    names = {"layer forward", "head backward", "optimizer", "coding dp-grad=powersgd,rank=2"}
    assert names <= set(measured.corrections)
    assert "measured; written to" in capsys.readouterr().out
    assert main([*words, "--measure", "--compress", "auto"]) == 0
    candidates = {"coding pp-forward=float8", "coding pp-backward=fixpoint,bits=6"}
    assert candidates <= set(read_cluster(tmp_path / "cluster.yaml").corrections)
    assert "--compress auto: predicted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--gpus", "3", "--no-search"], "does not divide the 3 processes"),
        (["--gpus", "3"], "no layout of 3 devices"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--cluster", "none.yaml"], "none.yaml"),
        (["--specs", "dp-grad=zip"], "no compressor is named 'zip'"),
        (["--specs", "dp-grad=powersgd,rank=4 dp-grad=fixpoint,bits=4"], "dp-grad is given twice"),
        (
            ["--specs", "", "--specs", "dp-grad=powersgd,rank=999"],
            "--specs dp-grad=powersgd: rank=999 is above the rank",
        ),
        (["--specs", "", "--no-search"], "--specs selects what is searched"),
        (["--write", "x.yaml", "--no-search"], "leave out --no-search"),
        (["--json", "."], "--json .: is a folder"),
        (["--json", "nowhere/x.json"], "there is no folder"),
        (["--write", "nowhere/x.yaml"], "there is no folder"),
        (["--cluster", "nowhere/x.yaml", "--measure"], "there is no folder"),
        (["--measure", "--gpus", "3", "--no-search"], "does not divide the 3 processes"),
        (["--config", "block.yaml", "--no-search"], "--recompute-method block"),
        (["--vocab-size", str(10**18)], "at most 16_777_216"),
        (["--max-loss-increase", "1"], "--max-loss-increase: give --compress auto, too"),
        (["--compress", "auto", "--max-loss-increase", "0%"], "--max-loss-increase is 0.0; it must be above 0"),
        (["--compress", "auto", "--max-loss-increase", "little"], "--max-loss-increase: 'little' is not a number"),
        (["--compress", "auto", "--no-search"], "--compress auto chooses for the run's layout; leave out --specs"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    (tmp_path / "block.yaml").write_text(small_run(recompute=block).to_yaml())
    words = [word.replace("block.yaml", str(tmp_path / "block.yaml")) for word in change]
    assert main([*_files(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_file_may_have_flags_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _files(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "{num-layers: 8, hidden_size: 64, num_attention_heads: 4, seq_length: 32, micro_batch_size: 1, lr: 0.001,\n"
        "global_batch_size: 32, train_iters: 100, vocab_size: 1000, pipeline_model_parallel_size: 2, zero-stage: 1}\n"
    )
    assert main([*words, "--no-search"]) == 0
    assert "tp 1, pp 2, dp 4, 8 micro-batches of 1, 1f1b, sharded" in capsys.readouterr().out


def test_a_run_that_does_not_suit_the_cluster_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, config = _files(tmp_path), tmp_path / "run.yaml"
    stages = "pipeline_model_parallel_size: "
    config.write_text(config.read_text().replace(f"{stages}2", f"{stages}16"))
    assert main([*words, "--specs", "", "--top", "1"]) == 0
    output = capsys.readouterr().out
    assert "the run as it is cannot be planned on 8 devices: " in output
    assert "the fastest of each of the fastest layouts, of " in output


def test_the_fastest_run_is_written_without_unused_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags cannot turn off options of a file, so a note names those options."""
    words = _files(tmp_path)
    plain = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
        "training": {"micro_batch_size": 1, "global_batch_size": 32, "train_iters": 100},
        "optimizer": {"lr": 1e-3},
        "tokenizer": {"vocab_size": 1000},
        "parallel": {
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True,
            "num_layers_per_virtual_pipeline_stage": 1,
        },
        "recompute": {"recompute_granularity": "full"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(RunConfig.from_dict(plain).to_yaml())
    best = tmp_path / "best.yaml"
    assert main([*words, "--specs", "", "--top", "1", "--write", str(best), "--json", str(tmp_path / "p.json")]) == 0
    output = capsys.readouterr().out
    choice = json.loads((tmp_path / "p.json").read_text())[1]["choice"]
    written = RunConfig.from_yaml(best.read_text())
    assert make_choice(written.resolve(8), 8).tp == choice["tp"]
    assert written.parallel.sequence_parallel == choice["sequence_parallel"]
    assert written.recompute.recompute_granularity is None
    (note,) = [line for line in output.splitlines() if "without the file's" in line]
    assert "recompute_granularity" in note
    assert "num_layers_per_virtual_pipeline_stage" in note


def test_a_recomputation_of_the_file_that_the_flags_do_not_replace_is_named() -> None:
    predictor, choice = predictor_of(small_run(recompute={"recompute_granularity": "full"}))
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    for recompute, named in ((block, True), ({"recompute_granularity": "full"}, False)):
        text = report.format_breakdown(predictor.predict(choice), CLUSTER, small_run(recompute=recompute))
        assert ("without the file's recompute_method" in text) is named
        assert ("recompute_num_layers" in text) is named


@pytest.mark.parametrize(
    ("words", "flag", "name"),
    [
        (["--json", "x.json", "--no-search"], "--json", "x.json"),
        (["--write", "x.yaml", "--specs", ""], "--write", "x.yaml"),
        (["--measure", "--no-search"], "--cluster", "cluster.yaml"),
    ],
)
def test_a_full_disk_is_one_line(
    words: list[str], flag: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _files(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = Path("cluster.yaml").read_text()
    with largest_file(20):
        assert main(["--config", "run.yaml", "--cluster", "cluster.yaml", "--top", "1", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"plan: error: {flag} {name}: cannot be written (File too large)")
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "cluster.yaml"}
    assert Path("cluster.yaml").read_text() == before


def test_measuring_keeps_other_corrections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = _files(tmp_path)
    corrections = {"tensor parallel": 1.5, "coding dp-grad=powersgd,rank=32": 2.0, "layer forward": 9.0}
    (tmp_path / "cluster.yaml").write_text(format_cluster(replace(CLUSTER, corrections=corrections)))
    rates = {"peak_tflops": 1.0, "memory_gbyte_per_s": 2.0, "op_us": 3.0, "layer forward": 1.25}
    monkeypatch.setattr("megatron.planner.command.measure_all", lambda *_: rates)
    assert main([*words, "--measure", "--no-search", "--gpus", "4"]) == 0
    measured = read_cluster(tmp_path / "cluster.yaml")
    assert measured.gpus == CLUSTER.gpus
    assert measured.corrections == corrections | {"layer forward": 1.25}


def test_a_measurement_is_a_median() -> None:
    tallies = [CostTally(seconds=seconds) for seconds in (9.0, 1.0, 1.1, 50.0, 1.2, 1.05)]
    assert CostTally.median(tallies).seconds == 1.1


@pytest.mark.usefixtures("warm")
def test_a_closed_pipe_gives_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} tools/plan.py {' '.join(_files(tmp_path))} --specs '' --top 200 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("the run as it is")
    assert "Traceback" not in done.stderr


def test_counts_are_positive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*_files(tmp_path), "--top", "0"])
    assert "--top 0: give at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("model:\n  bert_binary_head: true\n", "bert_binary_head looks like another model"),
        ("tokenizer:\n  tokenizer_type: BertWordPieceCase\n", "tokenizer_type BertWordPieceCase looks like another"),
        ("model:\n  decoder_seq_length: 8\n", "decoder_seq_length looks like another model than a GPT; write"),
    ],
)
def test_a_file_of_another_model_must_name_its_type(
    section: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files for pretrain_bert.py need not name it."""
    words = _files(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(section)
    assert main([*words, "--no-search"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"plan: error: --config {config}: {message}")
    kind = "  model_type: gpt\n" if section.startswith("model:") else "model:\n  model_type: gpt\n"
    config.write_text(section + kind)
    assert main([*words, "--no-search"]) == 2
    assert "looks like another model" not in capsys.readouterr().err


def test_a_classifier_is_planned_with_its_head(tmp_path: Path) -> None:
    """Without the language model's head."""
    sizes = {"micro_batch_size": 4, "global_batch_size": 32, "train_iters": 10}
    head = {"model_type": "bert", "task_head": "classification", "task_classes": 3}
    config = small_run(model=head, training=sizes)
    plan = tmp_path / "plan.json"
    assert main([*write_files(tmp_path, config), "--no-search", "--json", str(plan)]) == 0
    (prediction,) = json.loads(plan.read_text())
    padded = padded_vocab_size(VOCAB, config.model.make_vocab_size_divisible_by, 1)
    specs = tensors_of(config.model, padded)
    assert "classification_head.classifier.weight" in specs
    assert not any(name.startswith("lm_head") for name in specs)
    numbers = sum(math.prod(spec.logical_shape) for spec in specs.values())
    assert prediction["sent"]["dp-grad"] == pytest.approx(2 * 7 / 8 * 4 * numbers, rel=1e-3)
