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
from megatron.launcher.islands import launch_parser, wrong_islands
from megatron.models.stages import padded_vocab_size
from megatron.planner.choice import Choice, of_first_island
from megatron.planner.cluster import LinkSpec, check_sites, hop_wire, read_cluster, wire_between, write_cluster
from megatron.planner.command import main
from megatron.planner.islands import Transfer
from megatron.planner.predict import Predictor
from megatron.planner.report import flags, start
from megatron.planner.search import choices, search
from tests.unit.planner.support import CLUSTER, VOCAB, small_run

pytestmark = pytest.mark.slow

FAST = LinkSpec(4000.0, 1.0)
SITES = replace(CLUSTER, gpus_per_node=2, sites=2, between_sites=LinkSpec(0.5, 1000.0))
SPEC = "outer=fixpoint,bits=4,outer-preset=diloco,every=10"


def _choice(tp: int = 1, pp: int = 1, **more: Any) -> Choice:
    dp = 4 // (tp * pp)
    plain = Choice(tp, pp, dp, micro_batches=16 // dp, islands=2, overlap=dp > 1, specs=(SPEC,))
    return replace(plain, **more)


def test_a_group_that_spans_sites_goes_at_their_pace() -> None:
    whole = wire_between(SITES, 8, 1)
    assert whole.site is not None
    # One member's bytes leave the site, over all of its link.
    nbytes = 1e6
    slow = SITES.between_sites
    ring = 2 * (7 * slow.latency_us * 1e-6 + 7 / 8 * nbytes / (slow.gbit_per_s * 1e9 / 8))
    tree = 2 * (3 * slow.latency_us * 1e-6 + nbytes / (slow.gbit_per_s * 1e9 / 8))
    assert whole.collective("all-reduce", nbytes, 8) == pytest.approx(min(ring, tree))
    # Of an all-to-all each of a site's four sends half of what it has to the other.
    assert whole.collective("all-to-all", nbytes, 8) == pytest.approx(
        7 * slow.latency_us * 1e-6 + 4 * 4 / 8 * nbytes / (slow.gbit_per_s * 1e9 / 8)
    )
    assert wire_between(SITES, 4, 1).site is None
    assert wire_between(SITES, 2, 4).collective("all-reduce", nbytes, 2) > wire_between(SITES, 2, 1).collective(
        "all-reduce", 4 * nbytes, 2
    )
    # Both ranks of the stage send over it at once.
    assert hop_wire(SITES, 2, 1, 4).bytes_per_s == pytest.approx(0.5e9 / 8 / 2)
    assert hop_wire(SITES, 2, 0, 4).latency_s == CLUSTER.across.latency_us * 1e-6
    assert wire_between(replace(SITES, sites=1), 8, 1) == wire_between(replace(CLUSTER, gpus_per_node=2), 8, 1)


def test_a_file_says_what_sites_there_are(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(write_cluster(SITES))
    assert read_cluster(path) == SITES
    for sites in (3, 8):
        with pytest.raises(UserError, match=f"sites {sites}: 8 devices in nodes of 2 are not as many whole nodes"):
            check_sites(replace(SITES, sites=sites))


def test_a_delay_hides_what_it_can() -> None:
    one, two = Transfer((3.0,), 0.0, 0.0, 0.0), Transfer((3.0, 2.0), 0.0, 0.0, 0.0)
    assert [one.waited_s(delay, 1.0) for delay in (0, 1, 2, 3, 4)] == [3.0, 2.0, 1.0, 0.0, 0.0]
    # The second round begins after the step in which the first has ended, or when the last one has.
    assert [two.waited_s(delay, 1.0) for delay in (0, 1, 3, 4, 5)] == [5.0, 4.0, 2.0, 1.0, 0.0]
    assert two.waited_s(1, 10.0) == 2.0
    assert two.waited_s(2, 2.5) == pytest.approx(2.0)


@pytest.mark.parametrize("layout", [(1, 1, False), (1, 1, True), (2, 2, False), (1, 2, True)])
def test_an_exact_sum_over_islands_takes_what_their_link_does(layout: tuple[int, int, bool]) -> None:
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
    # A round of all fragments sends as much.
    exact = predictor.predict(replace(choice, specs=("outer=identity,every=10",))).outer
    assert exact is not None
    assert exact.round_bytes == pytest.approx(nbytes, rel=0.03)


def test_a_run_is_its_phases() -> None:
    """Seconds of a mean iteration, from those of each phase."""
    config = small_run(training={"train_iters": 101})
    predictor = Predictor(config, SITES, VOCAB)
    Predictor(config, SITES, VOCAB).predict(_choice(specs=()))  # a process's first dry run has an operation more
    inner = predictor.predict(_choice(specs=()))
    one = predictor.predict(_choice())
    plan = one.outer
    assert plan is not None
    assert (plan.in_step, plan.local) == (33, 68)
    rounds = math.ceil(68 / 10)
    whole = 101 * inner.seconds + 33 * plan.in_step_s + rounds * plan.round_s
    assert 101 * one.seconds == pytest.approx(whole)
    assert sum(one.parts.values()) == pytest.approx(one.seconds)
    assert one.tokens_per_s == pytest.approx(32 * 32 / one.seconds)
    assert 101 * one.sent["outer"] * 4 == pytest.approx(33 * plan.in_step_bytes + rounds * plan.round_bytes)
    # The same inner layout on its own nodes, with half of the batch.
    alone = Predictor(small_run(4, training={"global_batch_size": 16}), SITES.split_over_islands(2), VOCAB)
    assert inner.seconds == pytest.approx(alone.predict(_choice(specs=(), islands=1)).seconds)


def test_memory_is_that_of_the_anchor_its_momentum_and_the_rest() -> None:
    predictor = Predictor(small_run(), SITES, VOCAB)
    elements = predictor.elements(_choice(), 0)

    def numbers(spec: str, **more: Any) -> float:
        found = predictor.predict(_choice(specs=(spec,), **more))
        assert found.outer is not None
        assert found.memory["islands"] == found.outer.memory_bytes
        return found.outer.memory_bytes / 4 / elements

    assert numbers("outer=identity,every=10") == pytest.approx(3)
    assert numbers("outer=identity,every=10,outer-optimizer=plain") == pytest.approx(2)
    assert numbers("outer=identity,every=10,offload=on") == pytest.approx(1)
    assert numbers("outer=identity,every=10,fragments=5") == pytest.approx(2.2)
    assert numbers("outer=identity,every=10", sharded=True) == pytest.approx(1.5)
    assert numbers("outer=fixpoint,bits=4,every=10,error-feedback=on") == pytest.approx(4, rel=0.01)


def test_a_transfer_behind_steps_is_cheaper() -> None:
    predictor = Predictor(small_run(), SITES, VOCAB)
    base = "outer=identity,every=10,fragments=2"
    seconds = [predictor.predict(_choice(specs=(f"{base},delay={delay}",))).seconds for delay in (0, 1, 4)]
    assert seconds[0] > seconds[1] > seconds[2]


ISLANDS: dict[str, Any] = {"islands": {"islands": 2, "island": 0, "islands_address": "localhost:29600"}}


def test_the_search_finds_the_fastest_layouts_of_the_islands_of_the_run() -> None:
    """Every choice predicted, including memory of the outer optimizer."""
    small: dict[str, Any] = {"model": {"num_layers": 2}, "training": {"global_batch_size": 8}}
    predictor = Predictor(small_run(4, (SPEC,), **small, **ISLANDS), SITES, VOCAB)
    sets = ((SPEC,), ("pp-forward=fixpoint,bits=4", "dp-grad=powersgd,rank=2", SPEC))
    predictions = [predictor.predict(choice) for choice in choices(predictor.config, SITES, sets)]
    assert all(one.choice.islands == 2 and one.outer is not None for one in predictions)
    assert all(predictor.lower_bound(one.choice) <= one.seconds for one in predictions)
    limits = sorted(one.memory_bytes for one in predictions)
    for limit in (limits[-1], limits[len(limits) // 2]):
        fastest: dict[tuple[int, int, int], float] = {}
        for one in (one for one in predictions if one.memory_bytes <= limit):
            fastest[one.choice.layout] = min(one.seconds, fastest.get(one.choice.layout, math.inf))
        best = search(predictor, sets, top=3, memory_gib=limit / 2**30).best
        assert [one.seconds for one in best] == pytest.approx(sorted(fastest.values())[:3])
    with pytest.raises(UserError, match="nothing fits"):
        search(predictor, sets, memory_gib=(limits[0] - 1) / 2**30)


def test_the_flags_of_islands_are_those_of_training(tmp_path: Path) -> None:
    predictor = Predictor(small_run(4, (SPEC,), **ISLANDS), SITES, VOCAB)
    one = search(predictor, ((SPEC,),), top=1).best[0]
    run = tmp_path / "run.yaml"
    run.write_text(small_run().to_yaml())
    words = f"{start(one.choice, SITES)} {flags(one.choice)}".replace("--config FILE", f"--config {run}").split()
    arguments = launch_parser().parse_args(words[2:])
    assert wrong_islands(arguments) is None
    assert (arguments.island, arguments.islands, arguments.serve_islands) == (0, 2, "HOST:29600")
    assert int(arguments.nnodes) * int(arguments.nproc_per_node) == 4
    parsed = parse_args(arguments.training_script_args).config
    resolved = of_first_island(parsed).resolve(4)
    assert resolved.islands.islands == 2
    assert resolved.compression.specs(RunLength(100)).keys() == predictor.book.specs(one.choice).keys()
    assert one.choice.resolve(small_run()).training.global_batch_size == resolved.training.global_batch_size == 32


def _words(folder: Path, **sections: Any) -> list[str]:
    (folder / "run.yaml").write_text(small_run(4 if sections else 8, (SPEC,) if sections else (), **sections).to_yaml())
    (folder / "cluster.yaml").write_text(write_cluster(SITES))
    return ["--config", str(folder / "run.yaml"), "--cluster", str(folder / "cluster.yaml")]


def test_a_run_of_islands_is_predicted_and_its_layouts_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _words(tmp_path, **ISLANDS)
    faster = "outer=fixpoint,bits=4,every=30,in-step=compressed"
    sets = ["--specs", "", "--specs", faster]
    assert main([*words, *sets, "--top", "50", "--json", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert "2 islands, tp 1, pp 1, dp 4, 4 micro-batches of 1" in shown
    assert "33 iterations in step of " in shown
    given, *found = json.loads((tmp_path / "plan.json").read_text())
    assert given["choice"]["specs"] == [SPEC]
    assert {one["choice"]["islands"] for one in found} == {2}
    assert {tuple(one["choice"]["specs"]) for one in found} <= {(SPEC,), (faster,)}
    assert found[0]["choice"]["specs"] == [faster]
    for more in ([], ["--no-search"]):
        assert main([*words, *more, "--gpus", "9"]) == 2
        assert "--islands 2 does not divide the 9 devices" in capsys.readouterr().err


def test_a_run_of_one_world_is_searched_without_islands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_words(tmp_path), "--specs", ""]) == 0
    assert "islands" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ("outer=zip", "no compressor is named 'zip'"),
        ("outer=identity,every=0", "every"),
        ("outer=identity,every=10,outer-preset=diloco", "there is one; add --islands"),
    ],
)
def test_a_wrong_set_with_outer_is_one_line(
    specs: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_words(tmp_path), "--specs", specs]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plan: error: ")
    assert says in line


@pytest.mark.parametrize("option", [["--sites", "2"], ["--max-loss-increase", "2"]])
def test_options_of_a_search_over_islands_are_unknown(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--config", "x", "--cluster", "y", *option])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {' '.join(option)}" in capsys.readouterr().err
