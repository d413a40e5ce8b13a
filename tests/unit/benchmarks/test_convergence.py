"""The table of the convergence benchmark, from logs as runs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import convergence
from benchmarks.convergence import continuation_file, log_of, long_warmups, outcomes, table
from benchmarks.convergence_cases import CASES, family, is_flag, ladder_cases, read_case


def _log(path: Path, loss: float, sent: float, finished: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = [
        {"kind": "train", "iteration": i, "comm": {"pp-backward": {"wire_bytes": sent}, "control": {"wire_bytes": 9}}}
        for i in (1, 2)
    ]
    events.append({"kind": "validation", "iteration": 2, "lm_loss": 9.0})
    if finished:
        events.append({"kind": "test", "iteration": 2, "lm_loss": loss})
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_losses_are_compared_seed_by_seed_and_bytes_averaged(tmp_path: Path) -> None:
    for seed, loss in ((1, 4.0), (2, 5.0)):
        _log(log_of(tmp_path, "dense", seed, 2), loss, 8000.0)
        _log(log_of(tmp_path, "CB", seed, 2), loss * 1.01, 2000.0, finished=seed == 1)
        line = " validation results on CONTINUATION | exact match: {:.4E} +- 1.0E-03 | matched tokens: 1.1E+00 | "
        line += "ranking accuracy: 5.0000E-01 +- 1.1E-02 (by chance 0.25) | total examples: 2.0000E+03"
        continuation_file(log_of(tmp_path, "dense", seed, 2)).write_text(f"----\n{line.format(seed / 10)}\n----\n")
    rows = table(outcomes(tmp_path, {"dense": [], "CB": [], "CB+FE": []}, [1, 2], 2)).splitlines()
    assert len(rows) == 4
    assert rows[2].startswith("| dense |  | 2 | 4.5000 ± 0.7071 | +0.00% |  | 8.0 | 8.0 |")
    assert rows[2].endswith("| 8.0 | 15.00% | 50.00% |")
    assert rows[3].startswith("| CB |  | 1 | 4.0400 | +1.00% |  | 2.0 | 2.0 |")
    assert rows[3].endswith("| 2.0 |  |  |")


def test_a_warm_up_of_more_than_a_fifth_of_the_run_is_reported(tmp_path: Path) -> None:
    cases = {"dense": [], "mine": ["dp-grad=powersgd,rank=4,warmup=40", "--hidden-size=64"], "short": ["dp-grad=cast"]}
    for case in cases:
        _log(log_of(tmp_path, case, 1, 2), 4.0, 8.0)
    finished = outcomes(tmp_path, cases, [1], 2)
    assert long_warmups(finished, 200) == []
    (line,) = long_warmups(finished, 60)
    assert line.startswith("mine: sends exactly in the first 40 of 60 iterations (warmup=40)")
    assert "| mine | `dp-grad=powersgd,rank=4,warmup=40 --hidden-size=64` | 1 | 4.0000 |" in table(finished)


def test_the_specs_of_every_case_are_valid() -> None:
    from megatron.compression.builtin import BUILTIN
    from megatron.compression.points import EXPERT_LEGS
    from megatron.compression.registry import Registry
    from megatron.compression.schedule import RunLength
    from megatron.compression.spec import read_specs

    for words in CASES.values():
        specs = [word for word in words if not is_flag(word)]
        points = sum(len(EXPERT_LEGS.get(spec.partition("=")[0], (None,))) for spec in specs)
        assert len(read_specs(specs, Registry(BUILTIN), RunLength(1000))) == points


def test_a_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has the others; the reason is printed, and the status is that of a failure."""

    def train(out: Path, case: str, words: Any, seed: int, iterations: int, continues: bool, model: Any) -> None:
        if case == "CB+FE":
            raise SystemExit("error: it is refused")
        _log(log_of(out, case, seed, iterations), 4.0, 8000.0)

    monkeypatch.setattr(convergence, "train", train)
    monkeypatch.setattr(convergence.runs, "prepare", lambda *args: None)
    options = ["--seeds", "1,2", "--iterations", "2", "--out", str(tmp_path)]
    words = ["bench", "--cases", "dense; CB+FE; PowerSGD", *options]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match=r"as they failed .*: CB\+FE \(seed 1\); CB\+FE \(seed 2\)$"):
        convergence.main()
    captured = capsys.readouterr()
    assert captured.err.count("error: it is refused") == 2
    assert f"| PowerSGD | `{CASES['PowerSGD'][0]}` | 2 | 4.0000" in captured.out
    assert "PowerSGD: sends exactly in the first 40 of 2 iterations (warmup=40)" in captured.out
    assert (tmp_path / "table.md").read_text().count("\n") == 6


def test_another_model_has_its_own_folder_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: dict[str, list[str]] = {}

    def train(flags: list[str], name: str, log: Path, output: Path, **layout: Any) -> None:
        trained[name] = flags
        _log(log, 4.0, 8000.0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convergence.runs, "train", train)
    monkeypatch.setattr(convergence.runs, "prepare", lambda *args: None)
    words = ["--ladder", "dp-grad=p", "--model", "2x96", "--seeds", "1", "--iterations", "2", "--no-continuations"]
    monkeypatch.setattr("sys.argv", ["bench", *words])
    convergence.main()
    assert (tmp_path / "bench_out" / "convergence-2x96" / "table.md").exists()
    assert "replicas, dp-grad=powersgd,rank=24,factors=fixpoint8,warmup=0.04, seed 1" in trained
    for flags in trained.values():
        assert flags[flags.index("--num-layers") + 1] == "2"
        assert flags[flags.index("--hidden-size") + 1] == "96"
    monkeypatch.setattr("sys.argv", ["bench", "--model", "2"])
    with pytest.raises(SystemExit):
        convergence.main()


def test_each_case_is_compared_with_the_baseline_of_its_family(tmp_path: Path) -> None:
    """Experts with experts, and the others with the model of two stages."""
    cases = {"dense": 4.0, "CB": 4.2, "experts, dense": 3.0, "experts, all 8": 3.03}
    for case, loss in cases.items():
        _log(log_of(tmp_path, case, 1, 2), loss, 8000.0)
    percents = [outcome.worse for outcome in outcomes(tmp_path, dict.fromkeys(cases, ()), [1], 2)]
    assert percents == pytest.approx([0.0, 5.0, 0.0, 1.0])
    percents = [outcome.worse for outcome in outcomes(tmp_path, dict.fromkeys(reversed(cases), ()), [1], 2)]
    assert percents == pytest.approx([1.0, 0.0, 5.0, 0.0])


def test_the_interval_shows_equivalence(tmp_path: Path) -> None:
    """Means of three seeds, with 2.920 standard errors on each side."""
    losses = {"dense": (4.0, 4.0, 4.0), "PowerSGD": (4.0, 4.004, 4.008), "CB+FE": (4.0, 4.02, 4.04)}
    for case, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds, 1):
            _log(log_of(tmp_path, case, seed, 2), loss, 8000.0)
    finished = outcomes(tmp_path, dict.fromkeys(losses, ()), [1, 2, 3], 2)
    assert {outcome.case: outcome.interval for outcome in finished} == {
        "dense": "",
        "PowerSGD": "-0.07 to +0.27%, equivalent",
        "CB+FE": "-0.34 to +1.34%",
    }
    assert outcomes(tmp_path, {"dense": [], "CB+FE": []}, [1], 2)[1].interval == ""


def test_the_candidates_of_the_automatic_choice_are_cases() -> None:
    cases = ladder_cases()
    assert cases["replicas, dp-grad=fixpoint,bits=4,error-feedback=on"] == ["dp-grad=fixpoint,bits=4,error-feedback=on"]
    assert cases["param-gather=fixpoint,bits=4,group=2048"][1] == "--use-distributed-optimizer"
    baselines = {"dense", "replicas, dense", "tensors, dense", "expert pair, dense"}
    assert {family(case).baseline for case in cases} == baselines
    assert ladder_cases("pp-") == {case: words for case, words in cases.items() if case.startswith("pp-")} != {}


def test_cases_of_a_user_have_specs_flags_and_the_layout_of_their_first_word() -> None:
    name, words = read_case("islands, mine: outer=cast,every=5  --optimizer=muon")
    assert (name, words) == ("islands, mine", ["outer=cast,every=5", "--optimizer=muon"])
    assert [is_flag(word) for word in words] == [False, True]
    assert family(name).islands == 4
    assert family(name).baseline == "replicas, dense"
    assert family("islandsmine").baseline == "dense"
    assert family("tensors, mine").ranks == family("expert pair, mine").ranks == 2
    for wrong in ("outer=cast", ": outer=cast"):
        with pytest.raises(ValueError, match="write NAME: SPEC"):
            read_case(wrong)


def test_bytes_of_islands_are_sums_over_all_islands(tmp_path: Path) -> None:
    """The log is the first island's."""
    _log(log_of(tmp_path, "islands, mine", 1, 2), 4.0, 2000.0)
    assert outcomes(tmp_path, {"islands, mine": []}, [1], 2)[0].sent["pp-backward"] == 8.0


def test_a_table_without_a_finished_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["convergence", "--table", "--iterations", "7", "--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^2$"):
        convergence.main()
    assert "error: --table: no finished run of 7 iterations in" in capsys.readouterr().err
