"""``pretrain_gpt.py`` as a user runs it: its output, files and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config.run import RunConfig
from tests.support.cli import CliResult, launch_ranks_cli, run_cli
from tests.support.corpus import tiny_flags
from tests.support.events import read_events

SCRIPT = "pretrain_gpt.py"

TRAIN_LINE = re.compile(
    r"^ iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(s\): [\d.]+ \| "
    r"learning rate: \S+ \| global batch size: +\d+ \| lm loss: (\S+) \| loss scale: [\d.]+ \| "
    r"grad norm: [\d.]+ \| number of skipped iterations: +\d+ \| number of nan iterations: +\d+ \| "
    r"samples per second: [\d.]+ \| TFLOPs: [\d.]+ \| remaining time \(h\): [\d.]+ \|(?: [\w ]+: \S+ \|)*$",
    re.MULTILINE,
)


def _losses(result: CliResult) -> list[str]:
    return [match[3] for match in TRAIN_LINE.findall(result.check().stdout)]


@pytest.mark.multiprocess
def test_four_ranks_write_the_same_as_one_process(prefix: Path, tmp_path: Path) -> None:
    def flags(name: str) -> list[str]:
        return tiny_flags(
            prefix,
            save=tmp_path / name,
            save_interval=3,
            eval_interval=3,
            log_json_file=tmp_path / f"{name}.jsonl",
            log_txt_file=tmp_path / f"{name}.txt",
            tensorboard_dir=tmp_path / f"{name}-tb",
        )

    single = run_cli(1, [SCRIPT, *flags("one"), "--deterministic-mode", "--peak-tflops", "0.5"])
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--timing-log-level", "2"]
    four = run_cli(4, [SCRIPT, *flags("four"), *layout])
    assert len(_losses(single)) == 6
    assert single.stdout.count(" MFU: ") == 6
    assert "MFU" not in four.stdout
    assert [float(x) for x in _losses(four)] == pytest.approx([float(x) for x in _losses(single)], rel=1e-5)

    # 65 entries, 16 positions, 2 layers, the last norm; of a rank 33 rows (1 of them padding) and half of a layer.
    total = 65 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    largest = {"one": total, "four": 33 * 16 + 16 * 16 + 6 * 16 * 16 + 7 * 16 // 2 + 6 * 16}
    for name, result in (("one", single), ("four", four)):
        size = json.loads((tmp_path / f"{name}.jsonl").read_text().splitlines()[0])["size"]
        assert size == {"parameters": total, "largest_rank": largest[name], "tokens": 6 * 4 * 16}
        assert re.search(rf"^  parameters \.+ {total:,}$", result.stdout, re.MULTILINE)
    assert "validation loss at iteration 3 | lm loss value: " in four.stdout
    assert "validation loss at iteration 6 on 4-sample draw from test set | lm loss value: " in four.stdout
    assert re.search(r"^    forward-compute \.+: \([\d.]+, [\d.]+\)$", four.stdout, re.MULTILINE)
    text = (tmp_path / "four.txt").read_text()
    assert len(TRAIN_LINE.findall(text)) == 6
    trained = read_events(tmp_path / "four.jsonl")
    assert [event["iteration"] for event in trained] == [1, 2, 3, 4, 5, 6]
    assert {"pp-forward", "pp-backward", "tp-forward", "tp-backward", "embedding"} <= set(trained[-1]["comm"])
    # Activations of 4 micro-batches of (16, 1, 16) fp32 cross the only boundary, on both tensor-parallel ranks.
    assert trained[-1]["comm"]["pp-forward"]["wire_bytes"] == 2 * 4 * 16 * 16 * 4
    assert list((tmp_path / "four-tb").rglob("events.out.tfevents.*"))
    saved = tmp_path / "four"
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    assert {"iter_0000003", "iter_0000006"} <= {path.name for path in saved.iterdir()}
    config = RunConfig.from_yaml((saved / "iter_0000006" / "config.yaml").read_text())
    assert config.parallel.pipeline_model_parallel_size == 2
    assert config.resolve(4) == config


@pytest.mark.multiprocess
def test_impossible_settings_are_refused_on_every_rank_in_one_line(prefix: Path) -> None:
    flags = tiny_flags(prefix, tensor_model_parallel_size=2, num_attention_heads=1)
    with launch_ranks_cli(2, [SCRIPT, *flags]) as ranks:
        results = ranks.wait(60)
    assert [result.returncode for result in results] == [2, 2]
    assert re.fullmatch(r"error: .*--num-attention-heads.*\n", results[0].stderr)
    assert results[1].stderr == ""


@pytest.mark.multiprocess
def test_missing_data_are_named_in_one_line(tmp_path: Path) -> None:
    result = run_cli(1, [SCRIPT, *tiny_flags(tmp_path / "nothing")])
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert str(tmp_path / "nothing") in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.multiprocess
def test_skip_train_evaluates_only(prefix: Path) -> None:
    result = run_cli(1, [SCRIPT, *tiny_flags(prefix), "--skip-train"]).check()
    assert not TRAIN_LINE.search(result.stdout)
    assert "validation loss at iteration 0 on 4-sample draw from validation set" in result.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "delayed", [{}, {"delay": 1, "pipeline_model_parallel_size": 2, "no_pipeline_flush": True}], ids=["", "no flush"]
)
def test_a_run_that_learns_nothing_ends_with_its_own_status(
    prefix: Path, tmp_path: Path, delayed: dict[str, object]
) -> None:
    """And resumed at its end it says so again, as under ``torchrun --max-restarts``."""
    changes = {"fp16": True, "initial_loss_scale": 1e30, "save": tmp_path, "train_iters": 3, **delayed}
    for load in (None, tmp_path):
        with launch_ranks_cli(2, [SCRIPT, *tiny_flags(prefix, **changes, load=load)]) as ranks:
            results = ranks.wait(60)
        assert [result.returncode for result in results] == [4, 4], results[0].text()
        assert re.search(
            r"^error: nothing was learned: all 3 steps were skipped.*lower --lr.*\n\Z", results[0].stderr, re.M
        )
        assert "error" not in results[1].stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_train(prefix: Path, precision: str) -> None:
    changes: dict[str, object] = {precision: True, "train_iters": 40, "log_interval": 20}
    if precision == "fp16":
        changes["initial_loss_scale"] = 2**24  # overflows at first: some steps are skipped
    result = run_cli(1, [SCRIPT, *tiny_flags(prefix, **changes)]).check()
    assert re.search(r"^ estimate after 10 iterations: \d+ seconds more for the other 30, until ", result.stdout, re.M)
    losses = [float(x) for x in _losses(result)]
    assert losses[-1] < losses[0] - 0.3
    skipped = re.findall(r"number of skipped iterations: +(\d+)", result.stdout)
    assert int(skipped[0]) > 0 if precision == "fp16" else int(skipped[0]) == 0


@pytest.mark.multiprocess
def test_the_line_of_a_step_names_its_learning_rate(prefix: Path, tmp_path: Path) -> None:
    """The line, the record and the curve; Megatron's warm-up begins at a rate of 0, and the log says so."""
    log, curves = tmp_path / "log.jsonl", tmp_path / "curves"
    schedule = {"lr": 0.04, "lr_warmup_iters": 4, "lr_decay_style": "linear", "train_iters": 6}
    flags = tiny_flags(prefix, **schedule, log_json_file=log, tensorboard_dir=curves)
    result = run_cli(1, [SCRIPT, *flags]).check()
    used = [0.0, 0.01, 0.02, 0.03, 0.04, 0.02]
    assert [float(rate) for rate in re.findall(r"learning rate: (\S+)", result.stdout)] == used
    assert [event["learning_rate"] for event in read_events(log)] == pytest.approx(used)
    read = EventAccumulator(str(curves))
    read.Reload()
    points = [(point.step, point.value) for point in read.Scalars("learning-rate")]
    assert points == [(number, pytest.approx(rate)) for number, rate in enumerate(used, 1)]
    assert "note: the warm-up begins at a learning rate of 0: iteration 1 changes no weight" in result.stdout
