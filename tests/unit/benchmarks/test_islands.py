"""The benchmark of islands: its commands on each host, and its tables from the logs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.hosts import Lab, LabError
from benchmarks.network.islands import (
    IslandsRow,
    Pace,
    Runner,
    add_goals,
    average_seeds,
    imitate_h100,
    local_pace,
    parse,
    synchronous_pace,
    write,
)
from benchmarks.network.islands_cases import (
    BASELINE,
    CASES,
    EXACT_WARMUP,
    HOSTS,
    STAGES,
    IslandsCase,
    IslandsRun,
    Links,
)
from benchmarks.network.setups import H100_BF16
from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.flags import parse_args
from megatron.distributed.layout import Layout

ITERATIONS = 240
ISLANDS = IslandsCase("islands", "outer=fixpoint,bits=4,every=2", 0.25, every=2)


def _run(case: IslandsCase, folder: Path, name: str = "log", iterations: int = ITERATIONS) -> IslandsRun:
    return IslandsRun(case, iterations, folder / f"{name}.jsonl", folder, {"eval-iters": 1})


@pytest.mark.parametrize("case", [*CASES, EXACT_WARMUP], ids=lambda case: case.name)
def test_every_case_is_a_valid_run(case: IslandsCase, tmp_path: Path) -> None:
    """Its flags resolve, its warm-up has its share, and a round fits into the other iterations."""
    words = [word for word in _run(case, tmp_path).words()[1:] if "_text_document" not in word]
    words = [word for word in words if "/vocabulary/" not in word and word not in ("--vocab-file", "--merge-file")]
    words[words.index("GPT2BPETokenizer")] = "NullTokenizer"
    words += ["--vocab-size", "64"]
    words += ["--islands", "2", "--island", "1", "--islands-address", "h:1"] if case.has_islands else []
    config = parse_args(words).resolve(STAGES if case.has_islands else HOSTS * STAGES, cuda_available=False)
    if not case.has_islands:
        return
    spec = config.compression.specs(RunLength(ITERATIONS, None))[Point.OUTER]
    assert spec.activation.warmup_iters == case.warmup_iterations(ITERATIONS)
    assert spec.outer_options.every == case.every
    assert (spec.outer_options.in_step == "exact") == case.exact_warmup
    if case is not EXACT_WARMUP:
        assert RoundSchedule(spec.outer_options, case.warmup_iterations(ITERATIONS), ITERATIONS).rounds >= 5


def test_only_sums_of_gradients_cross_the_links(tmp_path: Path) -> None:
    """Each replica is on a single host, and so is each island."""
    lab = Lab([None] * HOSTS)
    commands = _run(BASELINE, tmp_path).commands(lab)
    layout = Layout(pp=STAGES, dp=HOSTS)
    assert [words[words.index("--node-rank") + 1] for _, words in commands] == ["0", "1", "2", "3"]
    assert all(len({commands[rank][0] for rank in ranks}) == 1 for ranks in layout.pp_groups())
    assert all(len({commands[rank][0] for rank in ranks}) == HOSTS for ranks in layout.dp_groups())
    (first_host, first), (second_host, second) = _run(CASES[-1], tmp_path).commands(lab)
    assert (first_host, second_host) == (0, 1)
    assert "--serve-islands=10.77.0.1:29600" in first
    assert "--islands-address=10.77.0.1:29600" in second


def _log(run: IslandsRun, seconds: list[float], sent: list[float], losses: dict[int, float]) -> Path:
    """Writes the first log of a run."""
    point = "outer" if run.case.has_islands else "dp-grad"
    lines: list[dict[str, Any]] = []
    for number, (duration, wire) in enumerate(zip(seconds, sent, strict=True), 1):
        times = {"seconds_per_iteration": duration, "comm": {point: {"wire_bytes": wire}} if wire else {}}
        lines.append({"kind": "train", "iteration": number, "lm_loss": 5.0, **times})
        if number in losses:
            lines.append({"kind": "validation", "iteration": number, "lm_loss": losses[number]})
    log = run.logs()[0]
    log.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return log


def test_paces_leave_out_the_first_step_and_the_end(tmp_path: Path) -> None:
    run = _run(BASELINE, tmp_path)
    log = _log(run, [9.0, 2.0, 3.0, 40.0], [6e6] * 4, {})
    assert synchronous_pace(log, run) == Pace(3.0, 3.0)  # of two hosts
    assert synchronous_pace(log, replace(run, hosts=3)) == Pace(3.0, 2.0)
    run = _run(replace(ISLANDS, every=3), tmp_path)
    pace = local_pace(_log(run, [9.0, 1.0, 2.0, 1.0, 50.0], [0, 0, 6e6, 0, 7e6], {}), run)
    assert [pace.seconds, pace.mb] == pytest.approx([4 / 3, 2.0])


def test_a_run_without_a_warm_up_has_a_single_pace(tmp_path: Path) -> None:
    run = _run(IslandsCase("local", ISLANDS.spec, 0.0, every=2), tmp_path, iterations=5)
    _log(run, [9.0, 1.0, 2.0, 1.0, 2.0], [0, 4e6, 0, 4e6, 0], {5: 4.0})
    row = IslandsRow.of(run, Links((100, 200)), None, Pace(1.5, 2.0))
    assert (row.warmup, row.warmup_mb, row.local, row.local_mb) == (None, None, 1.5, 2.0)
    assert row.minutes == pytest.approx(5 * 1.5 / 60)
    assert "100bit/200bit: local, seed 1: 1.50 s an iteration; 0." in row.line()


def test_times_to_the_baselines_loss(tmp_path: Path) -> None:
    """Eight iterations of 10 s, against two of 20 s and then 1 s, which reach the loss after six."""
    runs = [_run(BASELINE, tmp_path, "base", 8), _run(ISLANDS, tmp_path, "islands", 8)]
    _log(runs[0], [1.0] * 8, [2e7] * 8, {4: 5.0, 8: 4.0})
    _log(runs[1], [1.0] * 8, [1e6] * 8, {4: 4.5, 6: 4.0, 8: 3.9})
    links = Links((100, 100))
    paces: list[tuple[Pace, Pace | None]] = [(Pace(10.0, 20.0), None), (Pace(20.0, 30.0), Pace(1.0, 1.5))]
    rows = add_goals([IslandsRow.of(run, links, *pace) for run, pace in zip(runs, paces, strict=True)])
    assert [(row.warmup, row.local) for row in rows] == [(10.0, None), (20.0, 1.0)]
    assert [row.after for row in rows] == [8, 6]
    assert [60 * (row.goal_minutes or 0) for row in rows] == pytest.approx([80, 44])
    assert [row.times for row in rows] == pytest.approx([1, 80 / 44])
    _log(runs[1], [1.0] * 8, [0] * 8, {8: 4.1})
    missed = add_goals([rows[0], IslandsRow.of(runs[1], links, *paces[1])])
    assert (missed[1].goal, missed[1].after, missed[1].times) == (4.0, None, None)
    text = write(rows, tmp_path)
    assert (tmp_path / "table.md").read_text() == text + "\n"
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][1]["after"] == 6
    assert (tmp_path / "islands-100bit.png").stat().st_size > 10_000


def test_seeds_are_compared_with_their_own_baseline(tmp_path: Path) -> None:
    """The second seed's baseline ends at 4.2: a loss of 4.1 reaches it, and misses that of the first seed."""
    links, rows = Links((100, 20)), []
    for seed, goal, loss in ((1, 4.0, 4.1), (2, 4.2, 4.1), (3, 4.1, 4.1)):
        for case, final in ((BASELINE, goal), (ISLANDS, loss)):
            run = replace(_run(case, tmp_path, f"{case.name}{seed}", 4), seed=seed)
            _log(run, [10.0] * 4, [1e6] * 4, {2: 4.5, 4: final})
            rows.append(IslandsRow.of(run, links, Pace(10.0, 1.0), Pace(10.0, 1.0) if case.has_islands else None))
    rows = add_goals(rows)
    assert [row.goal for row in rows] == [4.0, 4.0, 4.2, 4.2, 4.1, 4.1]
    base, islands = average_seeds([asdict(row) for row in rows])
    assert (base["reached"], base["above"], base["times"]) == ("3 of 3", 0.0, 1.0)
    assert islands["loss"] == pytest.approx(4.1)
    assert islands["above"] == pytest.approx((4.1 / 4.0 + 4.1 / 4.2 + 1) / 3 - 1)
    assert islands["spread"] == "-2.38% to +2.50%"
    assert (islands["reached"], islands["times"], islands["after"]) == ("2 of 3", 1.0, 4)
    text = write(rows, tmp_path)
    assert "### 100bit/20bit; the loss is 4.0000, 4.2000, 4.1000" in text
    assert "| -2.38% to +2.50% |" in text
    assert "of seeds" not in write([row for row in rows if row.seed == 1], tmp_path)


def test_links_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    mbit = 10**6
    assert parse([]).links == [Links((100 * mbit,) * 2), Links((10 * mbit,) * 2)]
    links = parse(["--rates", "100mbit/100mbit/20mbit,50mbit"]).links
    assert links == [Links((100 * mbit, 100 * mbit, 20 * mbit)), Links((50 * mbit,) * 3)]
    assert [link.name for link in links] == ["100mbit/100mbit/20mbit", "50mbit"]
    assert parse([]).inside == 10**10
    assert parse(["--inside", "none"]).inside is None
    for words, message in (
        (["--rates", "1mbit/2mbit,1mbit/2mbit/3mbit"], "rates of 2 and of 3 hosts; give the same number in each"),
        (["--rates", "none"], "--rates none: give the rates of slow links"),
        (["--rates", "1mbit/none"], "--rates none: give the rates of slow links"),
        (["--seeds", "0"], "--seeds 0: give at least 1"),
    ):
        with pytest.raises(SystemExit):
            parse(words)
        assert message in capsys.readouterr().err
    with pytest.raises(LabError, match="--rate 5: write"):
        parse(["--rates", "5"])


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


def test_links_as_slow_as_those_of_a_published_system() -> None:
    """An H100's messages take 160 s and its computation 7.95 s; here 10 MB take 20 times as long as half a second."""

    class ScriptedRunner(Runner):
        def __init__(self, hosts: int) -> None:
            self.hosts = hosts

        def paces(self, case: IslandsCase, links: Links | None) -> tuple[Pace, Pace | None]:
            assert (case, links) == (BASELINE, None)
            return Pace(0.5, 20.0 * (self.hosts - 1) / self.hosts), None

    ratio = 160 / (6e9 * 256 * 2048 / H100_BF16)
    for hosts in (2, 3):
        (links,) = imitate_h100(ScriptedRunner(hosts), [Links((10**8, 10**7))])
        assert links.rates == pytest.approx([80e6 / (ratio * 0.5), 8e6 / (ratio * 0.5)], abs=1)
