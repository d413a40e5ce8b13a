"""Predicted time, bytes and memory of islands on sites behind slower links."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.compression.schedule import RunLength
from megatron.config.flags import parse_args
from megatron.launcher.islands import find_islands_problem, launch_parser
from megatron.models.stages import padded_vocab_size
from megatron.planner.choice import Choice, configure_first_island
from megatron.planner.cluster import LinkSpec, check_sites, format_cluster, hop_wire, read_cluster, wire_between
from megatron.planner.command import main
from megatron.planner.islands import Transfer
from megatron.planner.predict import Predictor
from megatron.planner.report import format_flags, format_launch_command
from megatron.planner.search import enumerate_choices, search
from tests.unit.planner.support import CLUSTER, VOCAB, fastest_seconds, limit_memory, small_run, write_files

pytestmark = pytest.mark.slow

FAST = LinkSpec(4000.0, 1.0)
SITES = replace(CLUSTER, gpus_per_node=2, sites=2, between_sites=LinkSpec(0.5, 1000.0))
SPEC = "outer=fixpoint,bits=4,outer-preset=diloco,every=10"


def _choice(tp: int = 1, pp: int = 1, **options: Any) -> Choice:
    dp = 4 // (tp * pp)
    plain = Choice(tp, pp, dp, micro_batches=16 // dp, islands=2, overlap=dp > 1, specs=(SPEC,))
    return replace(plain, **options)


def test_a_group_across_sites_uses_their_link() -> None:
    wire = wire_between(SITES, 8, 1)
    assert wire.site is not None
    # The bytes of a single member leave the site.
    nbytes, latency_s, bytes_per_s = 1e6, SITES.between_sites.latency_us * 1e-6, 0.5e9 / 8
    ring = 2 * (7 * latency_s + 7 / 8 * nbytes / bytes_per_s)
    tree = 2 * (3 * latency_s + nbytes / bytes_per_s)
    assert wire.collective("all-reduce", nbytes, 8) == pytest.approx(min(ring, tree))
    # In an all-to-all each of a site's four members sends half of its bytes to the other site.
    all_to_all = 7 * latency_s + 4 * 4 / 8 * nbytes / bytes_per_s
    assert wire.collective("all-to-all", nbytes, 8) == pytest.approx(all_to_all)
    assert wire_between(SITES, 4, 1).site is None
    inside, across = wire_between(SITES, 2, 1), wire_between(SITES, 2, 4)
    assert across.collective("all-reduce", nbytes, 2) > inside.collective("all-reduce", 4 * nbytes, 2)
    # Both ranks of the stage send at once.
    assert hop_wire(SITES, 2, 1, 4).bytes_per_s == pytest.approx(0.5e9 / 8 / 2)
    assert hop_wire(SITES, 2, 0, 4).latency_s == CLUSTER.across.latency_us * 1e-6
    assert wire_between(replace(SITES, sites=1), 8, 1) == wire_between(replace(CLUSTER, gpus_per_node=2), 8, 1)


def test_sites_are_written_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(format_cluster(SITES))
    assert read_cluster(path) == SITES
    for sites in (3, 8):
        with pytest.raises(UserError, match=f"sites {sites}: 8 devices in nodes of 2 do not divide into equal sites"):
            check_sites(replace(SITES, sites=sites))


def test_a_delay_hides_transfers() -> None:
    single, two = Transfer((3.0,), 0.0, 0.0, 0.0), Transfer((3.0, 2.0), 0.0, 0.0, 0.0)
    assert [single.waited_s(delay, 1.0) for delay in (0, 1, 2, 3, 4)] == [3.0, 2.0, 1.0, 0.0, 0.0]
    # The second round begins after the step in which the first has ended, or after the last step.
    assert [two.waited_s(delay, 1.0) for delay in (0, 1, 3, 4, 5)] == [5.0, 4.0, 2.0, 1.0, 0.0]
    assert two.waited_s(1, 10.0) == 2.0
    assert two.waited_s(2, 2.5) == pytest.approx(2.0)


@pytest.mark.parametrize("layout", [(1, 1, False), (1, 1, True), (2, 2, False), (1, 2, True)])
def test_an_exact_sum_over_islands_takes_the_time_of_their_link(layout: tuple[int, int, bool]) -> None:
    tp, pp, sharded = layout
    config = small_run()
    predictor = Predictor(config, SITES, VOCAB)
    choice = _choice(tp, pp, sharded=sharded)
    elements = tp * sum(predictor.elements(choice, rank) for rank in range(pp))
    tied = padded_vocab_size(VOCAB, config.model.make_vocab_size_divisible_by, tp) * config.model.hidden_size
    elements -= tied if pp > 1 else 0
    seconds, nbytes = predictor.outer.in_step(choice)
    assert nbytes == pytest.approx(2 * 1 / 2 * 4 * elements)
    assert seconds == pytest.approx(nbytes / (0.5e9 / 8), rel=0.5)
    assert seconds > nbytes / (0.5e9 / 8)
    # A round of all fragments sends the same bytes.
    exact = predictor.predict(replace(choice, specs=("outer=identity,every=10",))).outer
    assert exact is not None
    assert exact.round_bytes == pytest.approx(nbytes, rel=0.03)


def test_the_mean_iteration_is_the_sum_of_the_phases() -> None:
    config = small_run(training={"train_iters": 101})
    predictor = Predictor(config, SITES, VOCAB)
    Predictor(config, SITES, VOCAB).predict(_choice(specs=()))  # the first dry run of a process has another operation
    inner = predictor.predict(_choice(specs=()))
    prediction = predictor.predict(_choice())
    plan = prediction.outer
    assert plan is not None
    assert (plan.in_step, plan.local) == (33, 68)
    rounds = math.ceil(68 / 10)
    seconds = 101 * inner.seconds + 33 * plan.in_step_s + rounds * plan.round_s
    assert 101 * prediction.seconds == pytest.approx(seconds)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)
    assert prediction.tokens_per_s == pytest.approx(32 * 32 / prediction.seconds)
    assert 101 * prediction.sent["outer"] * 4 == pytest.approx(33 * plan.in_step_bytes + rounds * plan.round_bytes)
    # The same inner layout on the nodes of an island, with half of the batch.
    alone = Predictor(small_run(4, training={"global_batch_size": 16}), SITES.split_over_islands(2), VOCAB)
    assert inner.seconds == pytest.approx(alone.predict(_choice(specs=(), islands=1)).seconds)


def test_memory_of_the_outer_optimizer() -> None:
    predictor = Predictor(small_run(), SITES, VOCAB)
    elements = predictor.elements(_choice(), 0)

    def numbers(spec: str, **options: Any) -> float:
        prediction = predictor.predict(_choice(specs=(spec,), **options))
        assert prediction.outer is not None
        assert prediction.memory["islands"] == prediction.outer.memory_bytes
        return prediction.outer.memory_bytes / 4 / elements

    assert numbers("outer=identity,every=10") == pytest.approx(3)
    assert numbers("outer=identity,every=10,outer-optimizer=plain") == pytest.approx(2)
    assert numbers("outer=identity,every=10,offload=on") == pytest.approx(1)
    assert numbers("outer=identity,every=10,fragments=5") == pytest.approx(2.2)
    assert numbers("outer=identity,every=10", sharded=True) == pytest.approx(1.5)
    assert numbers("outer=fixpoint,bits=4,every=10,error-feedback=on") == pytest.approx(4, rel=0.01)


def test_a_delayed_transfer_is_cheaper() -> None:
    predictor = Predictor(small_run(), SITES, VOCAB)
    base = "outer=identity,every=10,fragments=2"
    seconds = [predictor.predict(_choice(specs=(f"{base},delay={delay}",))).seconds for delay in (0, 1, 4)]
    assert seconds[0] > seconds[1] > seconds[2]


ISLANDS: dict[str, Any] = {"islands": {"islands": 2, "island": 0, "islands_address": "localhost:29600"}}


def test_the_search_finds_the_fastest_layouts_of_islands() -> None:
    """Compared with all choices, including the memory of the outer optimizer."""
    small: dict[str, Any] = {"model": {"num_layers": 2}, "training": {"global_batch_size": 8}}
    predictor = Predictor(small_run(4, (SPEC,), **small, **ISLANDS), SITES, VOCAB)
    sets = ((SPEC,), ("pp-forward=fixpoint,bits=4", "dp-grad=powersgd,rank=2", SPEC))
    predictions = [predictor.predict(choice) for choice in enumerate_choices(predictor.config, SITES, sets)]
    assert all(prediction.choice.islands == 2 and prediction.outer is not None for prediction in predictions)
    assert all(predictor.lower_bound(prediction.choice) <= prediction.seconds for prediction in predictions)
    limits = sorted(prediction.memory_bytes for prediction in predictions)
    for limit in (limits[-1], limits[len(limits) // 2]):
        predictor.cluster = limit_memory(SITES, limit / 2**30)
        best = search(predictor, sets, top=3).best
        assert [prediction.seconds for prediction in best] == pytest.approx(fastest_seconds(predictions, limit)[:3])
    predictor.cluster = limit_memory(SITES, (limits[0] - 1) / 2**30)
    with pytest.raises(UserError, match="nothing fits"):
        search(predictor, sets)


def test_the_printed_command_starts_islands(tmp_path: Path) -> None:
    predictor = Predictor(small_run(4, (SPEC,), **ISLANDS), SITES, VOCAB)
    choice = search(predictor, ((SPEC,),), top=1).best[0].choice
    run = tmp_path / "run.yaml"
    run.write_text(small_run().to_yaml())
    words = f"{format_launch_command(choice, SITES)} {format_flags(choice)}".replace(
        "--config FILE", f"--config {run}"
    ).split()
    arguments = launch_parser().parse_args(words[2:])
    assert find_islands_problem(arguments) is None
    assert (arguments.island, arguments.islands, arguments.serve_islands) == (0, 2, "HOST:29600")
    assert int(arguments.nnodes) * int(arguments.nproc_per_node) == 4
    parsed = parse_args(arguments.training_script_args).config
    resolved = configure_first_island(parsed).resolve(4)
    assert resolved.islands.islands == 2
    assert resolved.compression.specs(RunLength(100)).keys() == predictor.book.specs(choice).keys()
    assert choice.resolve(small_run()).training.global_batch_size == resolved.training.global_batch_size == 32


def test_the_command_plans_a_run_of_islands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_files(tmp_path, small_run(4, (SPEC,), **ISLANDS), SITES)
    faster = "outer=fixpoint,bits=4,every=30,in-step=compressed"
    sets = ["--specs", "", "--specs", faster]
    assert main([*words, *sets, "--top", "50", "--json", str(tmp_path / "plan.json")]) == 0
    output = capsys.readouterr().out
    assert "2 islands, tp 1, pp 1, dp 4, 4 micro-batches of 1" in output
    assert "33 iterations in step of " in output
    planned_run, *candidates = json.loads((tmp_path / "plan.json").read_text())
    assert planned_run["choice"]["specs"] == [SPEC]
    assert {candidate["choice"]["islands"] for candidate in candidates} == {2}
    assert {tuple(candidate["choice"]["specs"]) for candidate in candidates} <= {(SPEC,), (faster,)}
    assert candidates[0]["choice"]["specs"] == [faster]
    for options in ([], ["--no-search"]):
        assert main([*words, *options, "--gpus", "9"]) == 2
        assert "--islands 2 does not divide the 9 devices" in capsys.readouterr().err


def test_a_run_without_islands_is_searched_without_islands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*write_files(tmp_path, small_run(), SITES), "--specs", ""]) == 0
    assert "islands" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("outer=zip", "no compressor is named 'zip'"),
        ("outer=identity,every=0", "every"),
        ("outer=identity,every=10,outer-preset=diloco", "there is one; add --islands"),
    ],
)
def test_an_invalid_outer_set_is_refused_in_one_line(
    specs: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*write_files(tmp_path, small_run(), SITES), "--specs", specs]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plan: error: ")
    assert message in line


def test_there_is_no_option_for_sites(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--config", "x", "--cluster", "y", "--sites", "2"])
    assert "unrecognized arguments: --sites 2" in capsys.readouterr().err
