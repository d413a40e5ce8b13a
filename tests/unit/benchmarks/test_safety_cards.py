"""Safety cards: layouts of specs, resuming, bad input, and the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.lab.hosts import LabError, Traffic
from benchmarks.safety import link, training
from benchmarks.safety import run as safety_run
from benchmarks.safety.card import law_figures, loss_section
from benchmarks.safety.law import Gap
from benchmarks.safety.link import LinkSpeed, hosts_of, link_run, measure_link
from benchmarks.safety.page import draw_card, page_of
from benchmarks.safety.run import card_folder, choose_form, main, make_planner, parse
from benchmarks.safety.settings import FULL, SHORT, RankLayout, layout_of, read_card_specs
from benchmarks.safety.training import Planner, record_cost, train_all

SPEC = "dp-grad=powersgd,rank=4"


def _record(loss: float) -> str:
    events: list[dict[str, Any]] = [
        {"kind": "config", "iteration": 0, "size": {"parameters": 5000}},
        {"kind": "train", "iteration": 2, "consumed_tokens": 2048, "comm": {"dp-grad": {"wire_bytes": 10.0}}},
        {"kind": "test", "iteration": 2, "lm_loss": loss},
    ]
    return "".join(json.dumps(event) + "\n" for event in events)


def _planner(out: Path, text: str = SPEC) -> Planner:
    return make_planner(out, text, SHORT)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the runs that are trained; each takes no time, and compressed losses are 1% higher."""
    titles: list[str] = []

    def train(flags: list[str], title: str, log: Path, output: Path, ranks: int, nodes: int) -> None:
        titles.append(title)
        log.write_text(_record(4.0 if title.startswith("dense") else 4.04))

    monkeypatch.setattr(training.runs, "train", train)
    return titles


def test_a_killed_card_goes_on_where_it_was(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = _planner(tmp_path)
    (tmp_path / "runs").mkdir()
    count = len(planner.all_runs)
    train, calls = training.runs.train, 0

    def killed(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            planner.all_runs[3].log.write_text(_record(9.0))  # its end is not known to be complete
            raise KeyboardInterrupt
        train(*args)

    monkeypatch.setattr(training.runs, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        train_all(planner.all_runs, print)
    assert [run.is_finished for run in planner.all_runs] == [True] * 3 + [False] * (count - 3)
    lines: list[str] = []
    train_all(planner.all_runs, lines.append)
    assert lines[0] == f"3 of {count} runs are finished"
    assert len(trained) == count == len(set(trained))
    assert planner.all_runs[3].loss == 4.04
    train_all(planner.all_runs, lines.append)
    assert len(trained) == count
    assert lines[-1] == f"{count} of {count} runs are finished"
    assert loss_section(planner.main_runs)["percents"] == pytest.approx([1.0] * SHORT.seeds)


def test_dense_runs_are_shared_by_cards_of_a_layout(tmp_path: Path, trained: list[str]) -> None:
    (tmp_path / "runs").mkdir()
    train_all(_planner(tmp_path).all_runs, print)
    before = len(trained)
    train_all(_planner(tmp_path, "dp-grad=cast").all_runs, print)
    assert len(trained) == before + before // 2
    assert not [title for title in trained[before:] if title.startswith("dense")]
    train_all(_planner(tmp_path, "pp-forward=cast").all_runs, print)
    assert len(trained) == 2 * before + before // 2


def test_runs_with_other_settings_or_another_code_have_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**changes: Any) -> str:
        return replace(_planner(tmp_path).main_runs[0], **changes).name

    names = {name(), name(seed=9), name(text="dp-grad=cast"), name(layout=RankLayout(dp=4)), name(values={"lr": 1.0})}
    monkeypatch.setattr(training, "code_digest", lambda: "changed")
    assert len({*names, name()}) == 6


def test_costs_are_those_of_programs(tmp_path: Path) -> None:
    import subprocess
    import sys

    with record_cost(tmp_path / "cost"):
        subprocess.run([sys.executable, "-IS", "-c", "sum(range(3_000_000))"], check=True)
    cost = json.loads((tmp_path / "cost").read_text())
    assert 0 < cost["cpu_s"] < 30
    assert cost["wall_s"] > 0
    with pytest.raises(KeyboardInterrupt), record_cost(tmp_path / "killed"):
        raise KeyboardInterrupt
    assert not (tmp_path / "killed").exists()


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (SPEC, RankLayout(dp=2)),
        ("pp-forward=delta,bits=4 pp-backward=fixpoint,bits=8", RankLayout(pp=2)),
        ("embedding=fused", RankLayout(pp=2, dp=2)),
        ("tp-forward=fixpoint tp-backward=fixpoint", RankLayout(tp=2)),
        ("param-gather=fixpoint,bits=4,group=2048", RankLayout(dp=2, flags={"use-distributed-optimizer": True})),
        ("dp-grad=fixpoint,levels=8/4,error-feedback=on", RankLayout(dp=4, nodes=2)),
        (
            "dp-grad=fixpoint,levels=8/4,error-feedback=on param-gather=fixpoint,bits=4,group=2048",
            RankLayout(dp=4, nodes=2, flags={"use-distributed-optimizer": True}),
        ),
        ("dp-grad=cast pp-forward=cast", RankLayout(pp=2, dp=2)),
    ],
)
def test_the_layout_gives_every_point_traffic(tmp_path: Path, text: str, layout: RankLayout) -> None:
    assert layout_of(read_card_specs(text, 100)) == layout
    for form in (SHORT, FULL):
        assert make_planner(tmp_path, text, form).layout.ranks == layout.ranks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --spec, such as --spec dp-grad=powersgd,rank=4"),
        (["--spec", " "], "--spec is empty"),
        (["--spec", "dp-grad=powersdg"], "--spec dp-grad=powersdg: no compressor is named 'powersdg'"),
        (["--spec", "dp-gard=cast"], "dp-gard: no such communication point"),
        (["--spec", "dp-grad=powersgd,rnk=4"], "powersgd has no option 'rnk'"),
        (["--spec", "outer=cast"], "--spec outer=cast: the toy runs have no traffic at outer; their points are"),
        (["--spec", "experts=default"], "the toy runs have no traffic at ep-dispatch-forward"),
        (["--spec", SPEC, "--seeds", "1"], "--seeds 1: give at least 2"),
        (["--spec", SPEC, "--link", "fast"], "--link fast: write 100mbit"),
        (["--spec", "dp-grad=cast", "--spec", "dp-grad=none1"], "none1"),
        (["--spec", "dp-grad=cast dp-grad=cast"], "dp-grad is given twice"),
    ],
)
def test_bad_input_ends_with_a_line_before_any_training(
    tmp_path: Path, words: list[str], message: str, trained: list[str], error_line: Callable[[], str]
) -> None:
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    line = error_line()
    assert line.startswith("safety-card: error: ")
    assert message in line
    assert not trained
    assert not (tmp_path / "out").exists()


def test_a_link_without_permission_ends_with_a_line(
    monkeypatch: pytest.MonkeyPatch, error_line: Callable[[], str]
) -> None:
    def refuse() -> None:
        raise safety_run.LabError("network namespaces need root: run it under sudo")

    monkeypatch.setattr(safety_run, "check_permission", refuse)
    assert main(["--spec", SPEC, "--link", "100mbit"]) == 2
    assert error_line() == "safety-card: error: network namespaces need root: run it under sudo"


def test_forms() -> None:
    full, short, more = (choose_form(parse(["--spec", SPEC, *words])) for words in ([], ["--short"], ["--seeds", "7"]))
    assert (full.seeds, short.seeds, more.seeds) == (5, 5, 7)
    assert {size.width for size in full.sizes} == {32, 64, 128}
    for form in (full, short):
        assert form.main in form.sizes
        assert form.heldout not in form.sizes
        assert len({size.iterations for size in form.sizes}) == 2


def test_runs_are_dense_and_compressed_pairs_of_the_same_flags(tmp_path: Path) -> None:
    planner = _planner(tmp_path)
    assert len(planner.all_runs) == 2 * (5 + 1 + 5 + 1)
    for dense, run in zip(planner.all_runs[::2], planner.all_runs[1::2], strict=True):
        index = run.flags.index("--compress")
        flags = run.flags[:index] + run.flags[index + 2 :]
        assert run.flags[index + 1] == SPEC
        assert [flag.replace(run.name, dense.name) for flag in flags] == dense.flags
    sizes = {(run.values["hidden-size"], run.values["train-iters"]) for run in planner.heldout_runs}
    assert sizes == {(SHORT.heldout.width, SHORT.heldout.iterations)}


class _FakeLab:
    """Hosts on which a dense iteration takes 0.2 s and sends 8 MB, and a compressed one 0.1 s and 1 MB."""

    made: ClassVar[list[tuple[list[int | None], float | None]]] = []
    status = 0

    def __init__(self, rates: list[int | None], cpus: float | None) -> None:
        self.rates, self.sent = rates, 0
        _FakeLab.made.append((rates, cpus))

    def __enter__(self) -> _FakeLab:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def traffic(self) -> list[Traffic]:
        return [Traffic(self.sent, 0), Traffic(self.sent // 2, 0)]

    def run(self, command: list[str], ranks_per_host: int) -> int:
        assert ranks_per_host == 1
        is_dense = "--compress" not in command
        iterations = int(command[command.index("--train-iters") + 1])
        self.sent += iterations * (8_000_000 if is_dense else 1_000_000)
        log = Path(command[command.index("--log-json-file") + 1])
        seconds = [9.0, *[0.2 if is_dense else 0.1] * 3]
        log.write_text("".join(json.dumps({"kind": "train", "seconds_per_iteration": s}) + "\n" for s in seconds))
        return self.status


def test_speeds_on_a_link_are_measured_in_turns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "Lab", _FakeLab)
    monkeypatch.setattr(_FakeLab, "made", [])
    monkeypatch.setattr(link.os, "cpu_count", lambda: 2)
    run, lines = link_run(_planner(tmp_path).main_runs[0], 10), list[str]()
    speed = measure_link(run, 10**8, run.file(".100mbit.json"), lines.append)
    assert speed.seconds == [0.1, 0.1]
    assert speed.dense_seconds == [0.2, 0.2]
    assert (speed.host_mb, speed.dense_host_mb) == (1.0, 8.0)
    assert speed.ratio == pytest.approx(2.0)
    assert [line.split(",")[0] for line in lines] == ["on the link: dense", "on the link: dp-grad=powersgd"] * 2
    assert measure_link(run, 10**8, run.file(".100mbit.json"), lines.append) == speed
    assert _FakeLab.made == [([10**8] * 2, 1.0)]


def test_a_failed_run_on_a_link_leaves_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "Lab", _FakeLab)
    monkeypatch.setattr(_FakeLab, "status", 3)
    run = link_run(_planner(tmp_path).main_runs[0], 10)
    with pytest.raises(LabError, match="a run on the link ended with status 3"):
        measure_link(run, None, run.file(".json"), print)
    assert not run.file(".json").exists()


def test_hosts_are_nodes_or_ranks(tmp_path: Path) -> None:
    hosts = {text: hosts_of(_planner(tmp_path, text).main_runs[0]) for text in (SPEC, "dp-grad=fixpoint,levels=8/4")}
    assert list(hosts.values()) == [2, 2]
    assert hosts_of(_planner(tmp_path, "embedding=fused").main_runs[0]) == 4
    assert LinkSpeed([1.0, 1.0, 1.0], [2.0, 3.0, 9.0], 1.0, 1.0, 0.0).ratio == 3.0


def _content(percents: list[float]) -> dict[str, Any]:
    losses = [4.0 * (1 + percent / 100) for percent in percents]
    runs = [_FakeRun(loss) for loss in losses]
    gaps = [Gap(n, d, p) for n in (10_000, 20_000) for d in (1000, 4000) for p in percents]
    side = {
        "by_point": {"dp-grad": 8000.0},
        "total": 8000.0,
        "ledger": 8100.0,
        "connections": 8200.0,
        "interfaces": 8300.0,
        "names": ["lo"],
        "reason": "",
    }
    return {
        "spec": SPEC,
        "form": "short",
        "layout": "2 replicas",
        "ranks": 2,
        "header": {"date": "2026-11-28 00:00 UTC", "cpus": 2, "device": "CPU", "torch": "2", "commit": "abc"},
        "main": {"width": 64, "iterations": 400, "tokens": 4000, "layers": 4},
        "loss": loss_section(runs),  # type: ignore[arg-type]
        "law": {
            **law_figures(gaps, [Gap(40_000, 4000, 9.0)]),
            "gaps": [{"width": g.parameters // 1000, "iterations": g.tokens // 10, **vars(g)} for g in gaps],
            "heldout_width": 40,
            "heldout_iterations": 400,
        },
        "canaries": {
            "seeds": 1,
            "prompts": 200,
            "exact": {"copy": 0.9, "sums": 0.5},
            "dense_exact": {"copy": 1.0, "sums": 0.6},
            "mastered": False,
        },
        "behavior": {"places": 2048, "flips": 0.05, "kl": 0.002, "dense_flips": 0.1, "dense_kl": 0.01},
        "bytes": {"dense": side, "compressed": {**side, "by_point": {"dp-grad": 1000.0}, "total": 1000.0}},
        "speed": None,
        "cost": {"runs": 14, "hours": 0.125, "cpu_hours": 0.25, "dense_hours": 0.0625},
    }


class _FakeRun:
    """A pair of finished runs.

    Args:
        loss: validation loss of the compressed run; that of the dense run is 4.
    """

    def __init__(self, loss: float) -> None:
        self.loss = loss

    @property
    def dense(self) -> _FakeRun:
        return _FakeRun(4.0)


def test_the_page_has_all_sections_and_the_figures() -> None:
    content = _content([0.9, 1.0, 1.1])
    page = page_of(content, "card.svg")
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        f"# `{SPEC}`", "## Loss", "## Law of the gap", "## Canaries", "## Flips and KL", "## Bytes", "## Speed"
    ]  # fmt: skip
    assert "**Short form**: fewer sizes" in page
    assert "Cost: 0.12 hours (0.25 of processors) for 14 runs; 0.06 of these for dense runs" in page
    assert "**worse by more than 0.3%**: mean difference of the validation loss +1.000%, 95% interval +0.75% to" in page
    assert "+1.25%, of 3 paired seeds (+0.900%, +1.000%, +1.100%)" in page
    assert "p = 0.997" in page
    assert "measured +9.000%, outside the interval" in page
    assert "| copy | 100.0% | 90.0% |" in page
    assert "has not mastered all of them" in page
    assert "| compressed and its dense twin | 5.0% | 0.0020 |" in page
    assert "| ratio | 0.5 | 0.2 |" in page
    assert "| dp-grad | 8.0 | 1.0 |" in page
    assert "- dense: 8.1 kB by the ledger; 8.2 kB by the kernel's counters of the connections; 8.3 kB (lo, with" in page
    assert "Not measured: give --link." in page


def test_the_page_says_what_has_no_counters_and_what_the_link_gave() -> None:
    content = _content([0.01, -0.02, 0.03])
    content["bytes"]["dense"]["reason"] = "no counters"
    content["speed"] = {
        "seconds": [0.1, 0.1], "dense_seconds": [0.2, 0.3], "host_mb": 1.0, "dense_host_mb": 8.0, "load": 0.5,
        "ratio": 2.5, "link": "100mbit",
    }  # fmt: skip
    page = page_of({**content, "form": "full"}, "card.svg")
    content["law"]["predicted"] |= {"low": 0.0, "high": 1e100}
    assert "95% interval +0.00% to +1e+100%; measured" in page_of(content, "card.svg")
    assert "form**" not in page
    assert "**equivalent within 0.3%**" in page
    assert "a linear law of logarithms" in page
    assert "- dense: counters are not compared: no counters" in page
    assert "| dense | 200, 300 | 8.00 |" in page
    assert "2.50 x dense on links of 100mbit" in page


@pytest.mark.parametrize("percents", [[0.9, 1.1], [0.1, -0.1]])
def test_the_picture_is_drawn(tmp_path: Path, percents: list[float]) -> None:
    draw_card(_content(percents), tmp_path / "card.svg")
    picture = (tmp_path / "card.svg").read_text()
    for text in (SPEC, "copy", "held out", "flips, %"):
        assert text in picture


def test_folders_of_cards_differ_by_spec_and_form(tmp_path: Path) -> None:
    planners = [make_planner(tmp_path, text, form) for text in (SPEC, "dp-grad=cast") for form in (SHORT, FULL)]
    assert len({card_folder(planner) for planner in planners}) == 4
