"""``--compress auto``: compressors that all ranks agree on, that the checkpoint keeps, and that flags repeat."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.load import load_common
from megatron.compression.points import EXPERT_POINTS
from megatron.training.saved_choice import CHOICE
from tests.support.cli import CliResult, launch_ranks_cli, run_cli
from tests.support.corpus import tiny_flags
from tests.support.events import read_events, read_losses
from tests.support.layer_codes import MODULE
from tests.support.machines import require_laboratory

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

REPO = Path(__file__).resolve().parents[2]
ADAPTING: dict[str, Any] = {
    "hidden_size": 64,
    "train_iters": 40,
    "compress": ["auto"],
    "compress_adapt": True,
    "max_loss_increase": 5,
}
STAGES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "pipeline_model_parallel_size": 2,
}
"""Long sequences, so that compressed messages save far more than the 3% that is worthwhile, on a busy machine too."""


def _train(prefix: Path, log: Path, compress: list[str], world_size: int = 4, **changes: Any) -> CliResult:
    flags = tiny_flags(prefix, **{**STAGES, "compress": compress, "log_json_file": log, **changes})
    return run_cli(world_size, ["pretrain_gpt.py", *flags]).check()


def _train_by_hand(prefix: Path, log: Path, flags_text: str, **changes: Any) -> None:
    """A run with the flags of a report."""
    flags = tiny_flags(prefix, **{**STAGES, "log_json_file": log, **changes})
    run_cli(4, ["pretrain_gpt.py", *flags, *flags_text.split()]).check()


def _train_on_slow_links(hosts: int, flags: list[str]) -> str:
    """Output of a run on so many hosts with slow links."""
    require_laboratory()
    lab = [str(REPO / "tools" / "netlab.py"), "--hosts", str(hosts), "--rate", "3mbit", "--timeout", "100", "--"]
    result = subprocess.run(
        [sys.executable, *lab, "pretrain_gpt.py", *flags], cwd=REPO, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def chosen(warm: None, prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on four hosts with slow links, stopped after 3 of 6 iterations, and what it printed."""
    folder = tmp_path_factory.mktemp("chosen")
    flags = tiny_flags(
        prefix,
        **STAGES,
        compress=["auto"],
        max_loss_increase=50,
        loss_check_interval=2,
        exit_interval=3,
        save=folder / "saved",
        log_json_file=folder / "log.jsonl",
    )
    return folder, _train_on_slow_links(4, flags)


def test_the_choice_is_made_without_training(chosen: tuple[Path, str], prefix: Path, tmp_path: Path) -> None:
    """On links as fast as this machine, whatever is chosen: the same report, nothing is saved, though flags are of a
    run that saves and resumes, and bad flags take one line."""
    folders = {"save": tmp_path / "saved", "save_interval": 3, "certificate": True, "load": chosen[0] / "saved"}
    resumed = {"ckpt_step": 3, "use_checkpoint_args": True}
    flags = tiny_flags(prefix, **STAGES, **folders, **resumed, max_loss_increase=50)
    result = run_cli(2, ["tools/choose.py", *flags]).check()
    assert re.search(
        r"--compress auto: (?:measured|predicted) .*\n  links: .*\n  point .*\n  pp-forward ", result.stdout
    )
    assert "measured and chosen in" in result.stdout
    assert "elapsed time per iteration" not in result.stdout
    assert "the checkpoint's run" not in result.stdout
    assert not (tmp_path / "saved").exists()
    refused = run_cli(2, ["tools/choose.py", *flags, "--max-loss-increase", "0"])
    assert refused.returncode == 2
    assert "--max-loss-increase" in refused.stderr


def test_slow_links_are_compressed_and_flags_repeat_the_run(
    chosen: tuple[Path, str], prefix: Path, tmp_path: Path
) -> None:
    """To the last digit: the measurement draws no random number of the run."""
    folder, text = chosen
    (by_hand,) = re.findall(r"the same by hand: (.*)", text)
    specs = re.findall(r"--compress (\S+)", by_hand)
    assert {spec.partition("=")[0] for spec in specs} >= {"pp-forward", "pp-backward", "dp-grad"}
    assert re.search(r"measured [\d.e-]+ s an iteration, [\d.e-]+ s without: [\d.]+ times as fast", text)
    trials = re.findall(r"trial steps: ([\d.e-]+) s \(predicted: ([\d.e-]+) s\) ([^;\n]*)", text)
    seconds = {specs_text: float(trial_s) for trial_s, _, specs_text in trials}
    ratios = [float(trial_s) / float(predicted_s) for trial_s, predicted_s, _ in trials]
    assert statistics.median(ratios) == pytest.approx(1.0, rel=0.01)  # predictions are calibrated
    assert seconds[by_hand.replace("--compress ", "")] < 0.7 * seconds["nothing"]
    waits = dict(re.findall(r"\n  (\S+) +[\d.]+ \w+ +(\d+)%  ", text))
    assert waits.keys() >= {"pp-forward", "pp-backward", "dp-grad"}
    assert 30 < sum(map(int, waits.values())) <= 100
    assert re.search(r"loss with all points together, as measured after the trial steps: [+-][\d.]+%", text)
    _train_by_hand(prefix, tmp_path / "by_hand.jsonl", by_hand)
    losses, repeated = read_losses(folder / "log.jsonl"), read_losses(tmp_path / "by_hand.jsonl")
    assert losses == {iteration: repeated[iteration] for iteration in (1, 2, 3)}


IN_LAYERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "tensors": ({"tensor_model_parallel_size": 2, "global_batch_size": 4}, {"tp-forward", "tp-backward"}),
    "experts": (
        # Two stages would not be repeated on a single node.
        {"num_experts": 4, "expert_model_parallel_size": 2, "moe_ffn_hidden_size": 32, "moe_two_stage": "auto"},
        {point.value for point in EXPERT_POINTS},
    ),
}


@pytest.mark.parametrize("name", IN_LAYERS)
def test_traffic_inside_layers_is_compressed_on_slow_links(name: str, prefix: Path, tmp_path: Path) -> None:
    """And the flags repeat the run."""
    changes, points = IN_LAYERS[name]
    sizes = {"seq_length": 64, "max_position_embeddings": 64, "micro_batch_size": 4, "global_batch_size": 8}
    layout = {"hidden_size": 64, "train_iters": 3, "compress_module": MODULE, **sizes, **changes}
    auto = {"compress": ["auto"], "max_loss_increase": 50, "log_json_file": tmp_path / "auto.jsonl"}
    text = _train_on_slow_links(2, tiny_flags(prefix, **layout, **auto))
    assert "the same by hand" in text, text
    (by_hand,) = re.findall(r"the same by hand: (.*)", text)
    specs = re.findall(r"--compress (\S+)", by_hand)
    assert {spec.partition("=")[0] for spec in specs} >= points
    by_hand_flags = tiny_flags(prefix, **layout, compress=specs, log_json_file=tmp_path / "by_hand.jsonl")
    run_cli(2, ["pretrain_gpt.py", *by_hand_flags]).check()
    assert read_losses(tmp_path / "auto.jsonl") == read_losses(tmp_path / "by_hand.jsonl")


def test_a_resumed_run_keeps_the_choice(chosen: tuple[Path, str], prefix: Path, tmp_path: Path) -> None:
    """Though its links are fast."""
    folder, text = chosen
    specs = re.findall(r"--compress (\S+)", re.findall(r"the same by hand: (.*)", text)[0])
    changes: dict[str, Any] = {"load": folder / "saved", "max_loss_increase": 50, "loss_check_interval": 2}
    resumed = _train(prefix, tmp_path / "resumed.jsonl", ["auto"], **changes)
    assert f"keeps the choice of the checkpoint's run: {' '.join(specs)}" in resumed.stdout
    assert "measured" not in resumed.stdout
    assert "predicted" not in resumed.stdout
    _train(prefix, tmp_path / "whole.jsonl", specs)
    checks = {event["iteration"]: event for event in read_events(tmp_path / "resumed.jsonl", "loss_check")}
    assert list(checks) == [4, 6]
    assert checks[4]["points"].keys() == {spec.partition("=")[0] for spec in specs}
    assert checks[4]["expected_increase"] == pytest.approx(sum(checks[4]["points"].values()))
    assert checks[4]["eased"] is None
    whole = read_losses(tmp_path / "whole.jsonl")
    assert read_losses(tmp_path / "resumed.jsonl") == {iteration: whole[iteration] for iteration in (4, 5, 6)}


def test_the_run_writes_a_safety_card_and_a_resumed_run_goes_on_with_it(
    chosen: tuple[Path, str], prefix: Path, tmp_path: Path
) -> None:
    folder, text = chosen
    card = folder / "saved" / "safety-card" / "card.md"
    assert f"safety card of this run: {card}" in text
    specs = re.findall(r"--compress (\S+)", re.findall(r"the same by hand: (.*)", text)[0])
    page = card.read_text()
    assert page.startswith(f"# `{' '.join(specs)}`\n")
    assert "; iterations 1 to 3." in page
    assert "given by the user" not in page
    assert "Checks during the run: 1, after iterations 2 to 2." in page
    again = tmp_path / "again"
    changes: dict[str, Any] = {"save": again, "max_loss_increase": 50, "loss_check_interval": 2}
    _train(prefix, tmp_path / "log.jsonl", ["auto"], load=folder / "saved", **changes)
    page = (again / "safety-card" / "card.md").read_text()
    assert "; iterations 1 to 3, 4 to 6." in page
    assert "Checks during the run: 3, after iterations 2 to 6." in page
    (again / "safety-card" / "card.md").write_text("")  # is not written by runs that save nothing, or no certificate
    _train(prefix, tmp_path / "log.jsonl", ["auto"], load=again, **changes, skip_train=True)
    _train(prefix, tmp_path / "log.jsonl", ["auto"], load=again, **changes, train_iters=7, certificate="false")
    assert (again / "iter_0000007").exists()
    assert (again / "safety-card" / "card.md").read_text() == ""


def test_a_spec_of_the_user_replaces_the_kept_one(chosen: tuple[Path, str], prefix: Path, tmp_path: Path) -> None:
    folder, _ = chosen
    budget = {"max_loss_increase": 50}
    resumed = _train(prefix, tmp_path / "log.jsonl", ["auto", "pp-forward=cast"], load=folder / "saved", **budget)
    (kept,) = re.findall(r"keeps the choice of the checkpoint's run: (.*)", resumed.stdout)
    assert "pp-forward" not in kept
    assert "dp-grad" in kept


def test_another_layout_chooses_again(chosen: tuple[Path, str], prefix: Path, tmp_path: Path) -> None:
    folder, text = chosen
    specs = re.findall(r"--compress (\S+)", re.findall(r"the same by hand: (.*)", text)[0])
    resumed = _train(prefix, tmp_path / "log.jsonl", ["auto"], 2, load=folder / "saved", pipeline_model_parallel_size=1)
    assert f"since the layout has changed; the checkpoint's run had {' '.join(specs)}" in resumed.stdout
    assert "pp-forward" not in resumed.stdout.partition("chooses again")[2].partition("\n")[2]
    assert "s an iteration" in resumed.stdout


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lr": 2e-2}, "--lr: max_lr is 0.02 on the command line and 0.01 in the checkpoint"),
        ({"hidden_size": 32}, "is a checkpoint of another model"),
        ({"optimizer": "lamb"}, "has the state of another optimizer; give --optimizer adam"),
    ],
)
def test_flags_that_do_not_fit_the_checkpoint_are_refused_before_the_choice(
    changes: dict[str, Any], line: str, chosen: tuple[Path, str], prefix: Path
) -> None:
    """The lower budget needs a new choice."""
    flags = tiny_flags(
        prefix, **{**STAGES, "compress": ["auto"], "load": chosen[0] / "saved", "max_loss_increase": 20, **changes}
    )
    result = run_cli(4, ["pretrain_gpt.py", *flags])
    assert result.returncode == 2
    assert line in result.stderr
    assert "chooses again, since --max-loss-increase is below 50" in result.stdout
    assert "measured" not in result.stdout


def _program_with_slowed_links(flags: list[str], log: Path, killed_after: str = "") -> str:
    """A program that trains on two hosts, whose links become slow after 16 iterations; its ranks are killed a second
    after their output contains ``killed_after``."""
    return textwrap.dedent(
        f"""
        import os, threading, time
        from pathlib import Path
        from benchmarks.lab.hosts import Lab
        from tests.support.cleanup import descendants

        def wait_for(path, text):
            while not path.exists() or text not in path.read_text():
                time.sleep(0.02)

        def change(lab):
            wait_for(Path({str(log)!r}), '"kind": "train", "iteration": 16')
            for host in range(2):
                lab.shape(host, 10_000_000)
            if {killed_after!r}:
                wait_for(Path("/proc/self/fd/1").resolve(), {killed_after!r})
                time.sleep(1.0)
                for pid in descendants(os.getpid()):
                    os.kill(pid, 9)

        with Lab([None, None]) as lab:
            threading.Thread(target=change, args=[lab], daemon=True).start()
            raise SystemExit(lab.run({["pretrain_gpt.py", *flags]!r}, timeout=150))
        """
    )


@pytest.fixture(scope="module")
def adapted(warm: None, prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """A run of 40 iterations on two hosts, whose links become slow after 16 of them: its folder, what it printed, and
    the iteration of its last choice."""
    require_laboratory()
    folder = tmp_path_factory.mktemp("adapted")
    log = folder / "log.jsonl"
    flags = tiny_flags(prefix, **ADAPTING, save=folder / "saved", save_interval=35, log_json_file=log)
    program = _program_with_slowed_links(flags, log)
    result = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    pauses = re.findall(r"pausing after iteration (\d+): to choose the compressors again", result.stdout)
    assert pauses, result.stdout
    return folder, result.stdout, int(pauses[-1])


def test_a_run_on_slower_links_chooses_again_and_goes_on(adapted: tuple[Path, str, int], prefix: Path) -> None:
    """To the last digit as one without compressors up to there, and as one that resumes with what was chosen."""
    folder, text, paused = adapted
    assert 17 < paused < 35
    before, _, after = text.rpartition("pausing after iteration")
    assert "links or devices are slower; the compressors are chosen again" in before
    assert "the same by hand: --compress" not in before
    (by_hand,) = re.findall(r"the same by hand: (.*)", after)
    specs = re.findall(r"--compress (\S+)", by_hand)
    assert any(spec.startswith("dp-grad=") for spec in specs)
    losses = read_losses(folder / "log.jsonl")
    assert sorted(losses) == list(range(1, 41))
    checks = read_events(folder / "log.jsonl", "loss_check")
    assert [event["iteration"] for event in checks] == [paused]  # before it goes on
    slowdowns = read_events(folder / "log.jsonl", "slowdown")
    assert slowdowns[-1]["iteration"] == paused - 1
    assert slowdowns[-1]["measured_s"] > 1.5 * slowdowns[-1]["expected_s"]
    # A run that is killed while it measures resumes from here: it knows what was expected, and will choose again.
    kept = load_common(folder / "saved", paused)[CHOICE]
    assert kept["specs"] == []
    assert kept["s_per_token"] * 4 * 16 == pytest.approx(slowdowns[-1]["expected_s"], rel=0.2)
    plain = {**ADAPTING, "compress": [], "compress_adapt": None, "max_loss_increase": None}
    run_cli(2, ["pretrain_gpt.py", *tiny_flags(prefix, **plain, log_json_file=folder / "plain.jsonl")]).check()
    uncompressed = read_losses(folder / "plain.jsonl")
    assert all(losses[iteration] == uncompressed[iteration] for iteration in range(1, paused + 1))
    assert losses[40] != uncompressed[40]
    resumed = {**plain, "compress": specs, "load": folder / "saved", "ckpt_step": paused}
    run_cli(2, ["pretrain_gpt.py", *tiny_flags(prefix, **resumed, log_json_file=folder / "by_hand.jsonl")]).check()
    by_hand_losses = read_losses(folder / "by_hand.jsonl")
    assert by_hand_losses == {iteration: losses[iteration] for iteration in range(paused + 1, 41)}


def test_a_run_that_has_adapted_resumes_exactly(adapted: tuple[Path, str, int], prefix: Path, tmp_path: Path) -> None:
    """With the choice of its links, though they are fast now."""
    folder, text, _ = adapted
    specs = re.findall(r"--compress (\S+)", re.findall(r"the same by hand: (.*)", text)[-1])
    resumed = {**ADAPTING, "load": folder / "saved", "ckpt_step": 35, "save": tmp_path / "saved"}
    flags = tiny_flags(prefix, **resumed, log_json_file=tmp_path / "log.jsonl")
    result = run_cli(2, ["pretrain_gpt.py", *flags]).check()
    assert f"keeps the choice of the checkpoint's run: {' '.join(specs)}" in result.stdout
    assert "measured" not in result.stdout
    losses = read_losses(folder / "log.jsonl")
    assert read_losses(tmp_path / "log.jsonl") == {iteration: losses[iteration] for iteration in range(36, 41)}


@pytest.mark.faults
def test_a_run_that_is_killed_while_it_chooses_again_resumes_and_chooses(
    warm: None, prefix: Path, tmp_path: Path
) -> None:
    require_laboratory()
    run = {**ADAPTING, "train_iters": 80, "save": tmp_path / "saved"}
    log = tmp_path / "log.jsonl"
    program = _program_with_slowed_links(tiny_flags(prefix, **run, log_json_file=log), log, "pausing after iteration")
    with (tmp_path / "output.txt").open("w") as output:
        killed = subprocess.run([sys.executable, "-c", program], cwd=REPO, stdout=output, stderr=output, timeout=200)
    assert killed.returncode != 0
    before, _, after = (tmp_path / "output.txt").read_text().rpartition("pausing after iteration")
    assert "the compressors are chosen again" in before
    assert "measured and chosen" not in after
    paused = int(re.match(r" (\d+)", after)[1])  # type: ignore[index]
    assert sorted(read_losses(log)) == list(range(1, paused + 1))
    flags = tiny_flags(prefix, **run, load=tmp_path / "saved", log_json_file=tmp_path / "resumed.jsonl")
    text = _train_on_slow_links(2, flags)
    assert "keeps the choice of the checkpoint's run: nothing" in text
    _, pause, choice_text = text.partition("pausing after iteration")
    assert pause
    assert re.search(r"the same by hand: --compress .*dp-grad=", choice_text)
    assert sorted(read_losses(tmp_path / "resumed.jsonl")) == list(range(paused + 1, 81))


def test_both_choices_of_a_pipeline_work_together(prefix: Path, tmp_path: Path) -> None:
    """The compressors are chosen before the first step, the schedule after the fifth."""
    schedule = {"pipeline_schedule": "auto", "global_batch_size": 8}
    result = _train(prefix, tmp_path / "log.jsonl", ["auto"], 2, **schedule)
    assert re.search(r"--compress auto: (?:measured|predicted) .*pipeline schedule: ", result.stdout, re.DOTALL)


def test_experts_of_the_user_are_measured_and_sums_that_are_left_out_are_no_candidates(
    prefix: Path, tmp_path: Path
) -> None:
    experts = {"num_experts": 2, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    result = _train(prefix, tmp_path / "log.jsonl", ["auto", "experts=default"], 2, **experts)
    assert re.search(r"--compress auto: (?:measured|predicted) .*\n  links: .*\n  point .*\n  dp-grad ", result.stdout)
    assert "\n  ep-" not in result.stdout
    alone = {"no_allreduce": True, "pipeline_model_parallel_size": 1}
    result = _train(prefix, tmp_path / "log.jsonl", ["auto"], 2, **alone)
    assert "no point without a spec has both traffic and a compressor to choose" in result.stdout


def test_nodes_of_different_size_are_refused_on_every_rank(prefix: Path) -> None:
    flags = tiny_flags(prefix, compress=["auto"], global_batch_size=3)
    with launch_ranks_cli(3, ["pretrain_gpt.py", *flags], env={"LOCAL_WORLD_SIZE": "2"}) as ranks:
        results = ranks.wait(100)
    assert [result.returncode for result in results] == [2, 2, 2]
    assert "--compress auto: nodes hold different numbers of ranks (2, 1)" in results[0].stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--max-loss-increase 0", "--max-loss-increase is 0.0; it must be above 0 and at most 100"),
        ("--max-loss-increase 101", "--max-loss-increase is 101.0; it must be above 0 and at most 100"),
        (
            "--islands 2 --island 0 --islands-address localhost:1 --compress outer=cast,every=1",
            "--compress auto: chooses within one island only",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "--compress auto: cannot predict this run (--recompute-method block",
        ),
    ],
)
def test_what_cannot_be_is_one_line(words: str, line: str, prefix: Path) -> None:
    flags = tiny_flags(prefix, **STAGES, compress=["auto"])
    result = run_cli(2, ["pretrain_gpt.py", *flags, *words.split()])
    assert result.returncode == 2
    assert line in result.stderr
    assert "Traceback" not in result.stderr
