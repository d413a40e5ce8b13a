"""The safety card that a run with ``--compress auto`` writes about itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.certificate import MAX_INCREASE, AutoDecision, LossCheck, SampledPoint, Statements, TrafficSpan
from megatron.config.flags import parse_args
from megatron.distributed.layout import Layout
from megatron.training.run_card import FOLDER, card_page, write_run_card
from tests.support.corpus import tiny_flags

POWERSGD, FIXPOINT = "dp-grad=powersgd,rank=4", "pp-forward=fixpoint,bits=4"
AUTO = AutoDecision(
    specs=[POWERSGD],
    predicted_s=0.2,
    uncompressed_s=0.41,
    trial_s=0.25,
    measured_s=0.22,
    report=[],
    increases={POWERSGD: 0.25, FIXPOINT: 0.125},
    checks=[LossCheck(100, 0.2), LossCheck(1_234_500, 0.7, "pp-forward"), LossCheck(1_234_600, 0.3)],
    uncompressed_trial_s=0.5,
    settings=["--overlap-grad-reduce"],
)
OLD_SPAN = TrafficSpan(0, 100, 4, 9, {"dp-grad": 10**9}, reason="a single rank sends nothing")
SPAN = TrafficSpan(
    100, 300, 4, 9, {"dp-grad": 2_000_000, "control": 2000}, 2_004_004, ["eth0"], 2_003_002,
    uncompressed={"dp-grad": 40_000_000, "control": 2000},
)  # fmt: skip
STATEMENTS = Statements(
    code="c" * 64,
    kernels="python",
    torch="2.13.0",
    inputs=[],
    traffic=[OLD_SPAN, SPAN],
    samples=[SampledPoint("dp-grad", True, 8, 5e-8, "ab"), SampledPoint("pp-backward", False, 4, 0.1, "c")],
    not_sampled={"pp-forward": "it sends everything"},
    auto=AUTO,
)
RESOLVED = parse_args(tiny_flags(Path("data"), pipeline_model_parallel_size=2, compress=["auto"])).resolve(4)
COMPRESSION = RESOLVED.compression.with_choice(["pp-backward=fixpoint,bits=8"], [POWERSGD])
CONFIG = dataclasses.replace(RESOLVED, compression=COMPRESSION)
LAYOUT = Layout(pp=2, dp=2)


def _page(auto: AutoDecision = AUTO, **changes: Any) -> str:
    return card_page(auto, dataclasses.replace(STATEMENTS, **changes), CONFIG, LAYOUT)


def test_the_page_has_loss_speed_bytes_and_messages() -> None:
    page = _page()
    assert page.startswith(f"# `{POWERSGD}`\n")
    for line in (
        "4 ranks (tensor-parallel 1, pipeline 2, data-parallel 2)",
        "iterations 1 to 100, 101 to 300.",
        f"make safety-card ARGS=\"--short --spec '{POWERSGD}'\"",
        "| `dp-grad=powersgd,rank=4` | 0.25% |",
        "| total | 0.38% |",
        "The budget is `--max-loss-increase 0.5`: 0.5%.",
        "The run also has `pp-backward=fixpoint,bits=8` (given by the user), `--overlap-grad-reduce`.",
        "Checks during the run: 3, after iterations 100 to 1234600.",
        "Expected increase: 0.20% to 0.70%, 0.30% at the last.",
        "Gentler settings, or none, were taken after iteration 1234500 (pp-forward).",
        f"No longer in use at the end: `{FIXPOINT}`.",
        "| without the choice, predicted | 0.41 |",
        "| without the choice, trial steps | 0.5 |",
        "| measured | 0.22 |",
        "In trial steps 2.00 times as fast as without.",
        "| dp-grad | 10 kB | 200 kB |",  # of 200 iterations: those of an earlier version are unknown
        "| control | 10 bytes | 10 bytes |",
        "| total | 10 kB | 200 kB |",
        "- Iterations 1 to 100: not compared with the interfaces: a single rank sends nothing.",
        "- Iterations 101 to 300: eth0 sent 1.0010 times as many bytes, the ranks' connections 1.0005 times.",
        "- dp-grad: relative error of message plus residual: at most 5e-08, in 8 samples",
        "- pp-backward: relative error of the message, which has no residual: at most 0.1, in 4 samples",
        "- pp-forward: not sampled: it sends everything",
        "- Ranks that must hold the same numbers agree bit by bit.",
    ):
        assert line in page, line


def test_what_is_not_known_is_said() -> None:
    none: dict[str, Any] = {
        "trial_s": None,
        "measured_s": None,
        "uncompressed_trial_s": None,
        "checks": [],
        "settings": [],
    }
    unknown = dataclasses.replace(AUTO, **none)
    page = _page(unknown, traffic=[OLD_SPAN], differences=["layers.0.bias on ranks 0 and 1"])
    assert "The run has not checked the loss" in page
    assert "`--overlap-grad-reduce`" not in page
    assert "times as fast" not in page
    assert "No bytes are known." in page
    assert "hold the same numbers differ: layers.0.bias on ranks 0 and 1." in page
    calm = dataclasses.replace(AUTO, checks=[LossCheck(100, 0.2)], specs=[POWERSGD, FIXPOINT])
    assert "No setting was replaced." in _page(calm)
    assert "No longer in use" not in _page(calm)


def test_bytes_are_those_since_the_choice() -> None:
    spans = [dataclasses.replace(SPAN, after=0, until=100, uncompressed={"dp-grad": 1}), SPAN]
    page = _page(dataclasses.replace(AUTO, after=100), traffic=spans)
    assert "| dp-grad | 10 kB | 200 kB |" in page
    assert "from iteration 101 on" in page


def test_a_card_whose_compressors_are_all_gone_says_so(tmp_path: Path) -> None:
    """And increases that are not finite do not hide the others."""
    checks = [LossCheck(100, 0.2), LossCheck(200, MAX_INCREASE, "dp-grad")]
    auto = dataclasses.replace(AUTO, specs=[], checks=checks)
    lines: list[str] = []
    write_run_card(tmp_path, CONFIG, LAYOUT, dataclasses.replace(STATEMENTS, auto=auto), lines.append)
    page = (tmp_path / FOLDER / "card.md").read_text()
    assert page.startswith("# No compressor is left\n")
    assert "make safety-card" not in page
    assert "Expected increase: 0.20% to not finite, not finite at the last." in page
    assert f"No longer in use at the end: `{POWERSGD}`, `{FIXPOINT}`." in page
    assert "1000000" not in (tmp_path / FOLDER / "card.svg").read_text()


def test_the_command_has_only_the_specs_that_it_knows() -> None:
    experts = "ep-dispatch-forward=fixpoint,bits=8"
    assert f"--spec '{POWERSGD}'" in _page(dataclasses.replace(AUTO, specs=[experts, POWERSGD, "tp-forward=mine"]))


@pytest.mark.parametrize("checks", [AUTO.checks, []])
def test_the_folder_holds_page_picture_and_json(checks: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    statements = dataclasses.replace(STATEMENTS, auto=dataclasses.replace(AUTO, checks=checks))
    for _ in range(2):  # a resumed run replaces them
        write_run_card(tmp_path, CONFIG, LAYOUT, statements, lines.append)
    folder = tmp_path / FOLDER
    assert lines == [f"safety card of this run: {folder / 'card.md'}"] * 2
    assert {path.name for path in folder.iterdir()} == {"card.md", "card.json", "card.svg"}
    assert "![The card as a picture](card.svg)" in (folder / "card.md").read_text()
    picture = (folder / "card.svg").read_text()
    assert POWERSGD in picture
    assert ("expected, at each check" in picture) == bool(checks)
    assert json.loads((folder / "card.json").read_text())["statements"] == statements.to_dict()


@pytest.mark.parametrize("auto", [None, dataclasses.replace(AUTO, specs=[], increases={})])
def test_a_run_without_chosen_compressors_has_no_card(auto: AutoDecision | None, tmp_path: Path) -> None:
    lines: list[str] = []
    write_run_card(tmp_path, CONFIG, LAYOUT, dataclasses.replace(STATEMENTS, auto=auto), lines.append)
    assert lines == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [FOLDER, f"{FOLDER}/card.md"])
def test_a_card_that_cannot_be_written_is_a_warning(name: str, tmp_path: Path) -> None:
    lines: list[str] = []
    if name == FOLDER:
        (tmp_path / FOLDER).write_text("a file")
    else:
        (tmp_path / name).mkdir(parents=True)
    write_run_card(tmp_path, CONFIG, LAYOUT, STATEMENTS, lines.append)
    (line,) = lines
    assert line.startswith(f"warning: the run's safety card in {tmp_path / FOLDER} is not complete: ")
