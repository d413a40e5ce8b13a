"""The benchmark of islands: what it runs where, and what it makes of the logs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.hosts import FRAME, Lab, LabError
from benchmarks.network.islands import Runner, links_of, parse
from benchmarks.network.islands_cases import (
    BASELINE,
    CASES,
    HOSTS,
    IN_STEP,
    STAGES,
    IslandsCase,
    IslandsRun,
    Links,
)
from benchmarks.network.islands_report import IslandsRow, Pace, compared, dp_pace, framed, local_pace, over_seeds, write
from benchmarks.network.setups import H100_BF16
from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.flags import parse_args
from megatron.distributed.layout import Layout

ITERATIONS = 240
ISLANDS = IslandsCase("islands", "outer=fixpoint,bits=4,every=2", 0.25, every=2)


def _run(case: IslandsCase, folder: Path) -> IslandsRun:
    return IslandsRun(case, ITERATIONS, folder / "log.jsonl", folder, {"eval-iters": 1})


@pytest.mark.parametrize("case", [*CASES, IN_STEP], ids=lambda case: case.name)
def test_every_case_is_a_run_that_can_be_had(case: IslandsCase, tmp_path: Path) -> None:
    """Its flags resolve, it goes in step for its share, and a round fits into what is left."""
    words = [word for word in _run(case, tmp_path).words()[1:] if "_text_document" not in word]
    words = [word for word in words if "/vocabulary/" not in word and word not in ("--vocab-file", "--merge-file")]
    words[words.index("GPT2BPETokenizer")] = "NullTokenizer"
    words += ["--vocab-size", "64"]
    words += ["--islands", "2", "--island", "1", "--islands-address", "h:1"] if case.has_islands else []
    world = STAGES if case.has_islands else HOSTS * STAGES
    config = parse_args(words).resolve(world, cuda_available=False)
    if not case.has_islands:
        return
    spec = config.compression.specs(RunLength(ITERATIONS, None))[Point.OUTER]
    assert spec.activation.warmup_iters == case.steps_in_step(ITERATIONS)
    assert spec.outer_options.every == case.every
    assert (spec.outer_options.in_step == "exact") == case.sums_exactly
    if case is not IN_STEP:
        assert RoundSchedule(spec.outer_options, case.steps_in_step(ITERATIONS), ITERATIONS).rounds >= 5


def test_only_sums_of_gradients_use_the_link(tmp_path: Path) -> None:
    """Of one world each replica is on one host; of islands each is."""
    lab = Lab([None] * HOSTS)
    commands = _run(BASELINE, tmp_path).commands(lab)
    layout = Layout(pp=STAGES, dp=HOSTS)
    assert [words[words.index("--node-rank") + 1] for _, words in commands] == ["0", "1", "2", "3"]
    assert all(len({commands[rank][0] for rank in ranks}) == 1 for ranks in layout.pp_groups())
    assert all(len({commands[rank][0] for rank in ranks}) == HOSTS for ranks in layout.dp_groups())
    (first, serves), (second, finds) = _run(CASES[-1], tmp_path).commands(lab)
    assert (first, second) == (0, 1)
    assert "--serve-islands=10.77.0.1:29600" in serves
    assert "--islands-address=10.77.0.1:29600" in finds


def _log(path: Path, seconds: list[float], sent: list[float], losses: dict[int, float], point: str = "outer") -> Path:
    lines: list[dict[str, Any]] = []
    for number, (one, wire) in enumerate(zip(seconds, sent, strict=True), 1):
        comm = {point: {"wire_bytes": wire}} if wire else {}
        lines.append({"kind": "train", "iteration": number, "lm_loss": 5.0, "seconds_per_iteration": one, "comm": comm})
        if number in losses:
            lines.append({"kind": "validation", "iteration": number, "lm_loss": losses[number]})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_paces_leave_out_the_first_step_and_the_end(tmp_path: Path) -> None:
    log = _log(tmp_path / "dp", [9.0, 2.0, 3.0, 40.0], [6e6] * 4, {}, "dp-grad")
    assert dp_pace(log, _run(BASELINE, tmp_path)) == Pace(3.0, 3.0)  # of two hosts
    assert dp_pace(log, replace(_run(BASELINE, tmp_path), hosts=3)) == Pace(3.0, 2.0)
    log = _log(tmp_path / "local", [9.0, 1.0, 2.0, 1.0, 50.0], [0, 0, 6e6, 0, 7e6], {})
    found = local_pace(log, _run(replace(ISLANDS, every=3), tmp_path))
    assert [found.seconds, found.mb] == pytest.approx([4 / 3, 2.0])


def test_a_run_without_steps_in_step_has_one_pace(tmp_path: Path) -> None:
    case = IslandsCase("local", ISLANDS.spec, 0.0, every=2)
    log = _log(tmp_path / "log.jsonl", [9.0, 1.0, 2.0, 1.0, 2.0], [0, 4e6, 0, 4e6, 0], {5: 4.0})
    counted = {"counter": 9e6, "ledger": 8e6}
    for paces in (None, (None, Pace(1.5, 2.0))):
        row = IslandsRow.of(IslandsRun(case, 5, log, tmp_path, {}), Links((100, 200)), counted, paces)
        assert (row.in_step, row.in_step_mb, row.local, row.local_mb) == (None, None, 1.5, 2.0)
        assert "100bit/200bit: local, seed 1: 1.50 s an iteration; 0." in row.line()


def test_the_time_to_the_baselines_loss_measured_and_computed(tmp_path: Path) -> None:
    """Eight iterations of 10 s against two of 20 s and six of 1 s, which have the loss after six; on another link of
    100 s against two of 150 s."""
    base = _log(tmp_path / "base.jsonl", [10.0] * 8, [2e7] * 8, {4: 5.0, 8: 4.0}, "dp-grad")
    own = _log(
        tmp_path / "own.jsonl", [20.0] * 2 + [1.0] * 6, [3e7, 3e7, 0, 3e6, 0, 3e6, 0, 3e6], {4: 4.5, 6: 4.0, 8: 3.9}
    )
    counted = {"counter": 7.3e7, "ledger": 6.9e7}
    runs_of = [IslandsRun(BASELINE, 8, base, tmp_path, {}), IslandsRun(ISLANDS, 8, own, tmp_path, {})]
    fast, slow_links = Links((100, 100)), Links((10, 10))
    found = [
        IslandsRow.of(runs_of[0], fast, counted, None),
        IslandsRow.of(runs_of[1], fast, counted, None),
        IslandsRow.of(runs_of[0], slow_links, counted, (Pace(100.0, 10.0), None)),
        IslandsRow.of(runs_of[1], slow_links, counted, (Pace(150.0, 30.0), Pace(1.0, 1.5))),
    ]
    done = compared(found, BASELINE.name)
    assert [one.measured for one in done] == [True, True, False, False]
    assert [(one.in_step, one.local) for one in done[:2]] == [(10.0, None), (20.0, 1.0)]
    assert (done[0].in_step_mb, done[1].in_step_mb, done[1].local_mb) == (10.0, 30.0, 1.5)
    assert [one.after for one in done] == [8, 6, 8, 6]
    assert [60 * (one.goal_minutes or 0) for one in done] == pytest.approx([80, 44, 800, 304])
    assert [one.times for one in done] == pytest.approx([1, 80 / 44, 1, 800 / 304])
    slow = _log(tmp_path / "slow.jsonl", [1.0] * 8, [0] * 8, {8: 4.1})
    late = compared([done[0], IslandsRow.of(replace(runs_of[1], log=slow), fast, counted, None)], BASELINE.name)
    assert (late[1].after, late[1].times) == (None, None)
    peers = [{"case": "torch", "links": "100bit", "seconds": 1.0, "counted_mb": 2.0}]
    text = write(done[:4], peers, tmp_path, BASELINE.name)
    assert text.count("| measured |") == text.count("| computed |") == 2
    assert (tmp_path / "table.md").read_text() == text + "\n"
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][1]["after"] == 6
    assert (tmp_path / "islands-100bit.png").stat().st_size > 10_000
    assert framed(1448.0) == FRAME + 33


def test_seeds_are_compared_with_their_own_baseline(tmp_path: Path) -> None:
    """The second seed's baseline ends at 4.2: a loss of 4.1 has it there, and misses the first's."""
    counted, links = {"counter": 2e6, "ledger": 1e6}, Links((100, 20))
    found = []
    for seed, goal, loss in ((1, 4.0, 4.1), (2, 4.2, 4.1), (3, 4.1, 4.1)):
        for case, final in ((BASELINE, goal), (ISLANDS, loss)):
            name = "dp-grad" if case is BASELINE else "outer"
            log = _log(tmp_path / f"{seed}{name}.jsonl", [10.0] * 4, [1e6] * 4, {2: 4.5, 4: final}, name)
            run = IslandsRun(case, 4, log, tmp_path, {}, seed=seed)
            found.append(IslandsRow.of(run, links, counted, None))
    done = compared(found, BASELINE.name)
    assert [row.goal for row in done] == [4.0, 4.0, 4.2, 4.2, 4.1, 4.1]
    base, own = over_seeds([asdict(row) for row in done])
    assert (base["reached"], base["above"], base["times"]) == ("3 of 3", 0.0, 1.0)
    assert own["loss"] == pytest.approx(4.1)
    assert own["above"] == pytest.approx((4.1 / 4.0 + 4.1 / 4.2 + 1) / 3 - 1)
    assert own["spread"] == "-2.38% to +2.50%"
    assert (own["reached"], own["times"], own["after"]) == ("2 of 3", 1.0, 4)
    text = write(done, [], tmp_path, BASELINE.name)
    assert "### 100bit/20bit; the loss is 4.0000, 4.2000, 4.1000" in text
    assert "| -2.38% to +2.50% |" in text
    assert "of seeds" not in write([row for row in done if row.seed == 1], [], tmp_path, BASELINE.name)


def _parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["bench-islands", *words])
    return parse()


def test_links_of_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mbit = 10**6
    assert _parsed(monkeypatch).links == [Links((100 * mbit,) * 2), Links((10 * mbit,) * 2)]
    found = _parsed(monkeypatch, "--rates", "100mbit/100mbit/20mbit,50mbit").links
    assert found == [Links((100 * mbit, 100 * mbit, 20 * mbit)), Links((50 * mbit,) * 3)]
    assert [links.name for links in found] == ["100mbit/100mbit/20mbit", "50mbit"]
    assert _parsed(monkeypatch).inside == 10**10
    assert _parsed(monkeypatch, "--inside", "none").inside is None
    for words, said in (
        (["--rates", "1mbit/2mbit,1mbit/2mbit/3mbit"], "rates of 2 and of 3 hosts; give as many in each"),
        (["--rates", "none"], "--rates none: give the rates of slow links"),
        (["--rates", "1mbit/none"], "--rates none: give the rates of slow links"),
        (["--seeds", "0"], "--seeds 0: at least 1"),
    ):
        with pytest.raises(SystemExit):
            _parsed(monkeypatch, *words)
        assert said in capsys.readouterr().err
    with pytest.raises(LabError, match="--rate 5: write"):
        _parsed(monkeypatch, "--rates", "5")


def test_a_run_of_three_islands(tmp_path: Path) -> None:
    """Two micro-batches on each host, whatever the number of hosts."""
    run = replace(_run(CASES[-1], tmp_path), hosts=3, seed=5)
    words = run.words()
    assert words[words.index("--global-batch-size") + 1] == "24"
    assert words[words.index("--seed") + 1] == "5"
    commands = run.commands(Lab([None] * 3))
    assert [host for host, _ in commands] == [0, 1, 2]
    assert all("--islands=3" in words for _, words in commands)
    assert len(run.logs()) == 3
    ranks = replace(run, case=BASELINE).commands(Lab([None] * 3))
    assert [host for host, _ in ranks] == [0, 1, 2, 0, 1, 2]


def test_links_as_slow_as_those_of_a_published_system(tmp_path: Path) -> None:
    """An H100 takes 160 s for what it computes in 7.95 s; so here 10 MB take 20 times as long as half a second."""

    class Still(Runner):
        def __init__(self, hosts: int) -> None:
            self.hosts = hosts

        def paces(self, case: IslandsCase, links: Links | None) -> tuple[Pace, Pace | None]:
            assert (case, links) == (BASELINE, None)
            return Pace(0.5, 20.0 * (self.hosts - 1) / self.hosts), None

    ratio = 160 / (6e9 * 256 * 2048 / H100_BF16)
    wanted = [Links((10**8, 10**7))]
    for hosts in (2, 3):
        (found,) = links_of(Still(hosts), wanted, True)
        assert found.rates == pytest.approx([80e6 / (ratio * 0.5), 8e6 / (ratio * 0.5)], abs=1)
        assert links_of(Still(hosts), wanted, False) == wanted
