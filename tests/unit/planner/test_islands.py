"""Islands on sites behind slower links: what is predicted, what is found, and what is said."""

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
from megatron.planner.cluster import Cluster, LinkSpec, check_sites, hop_wire, read_cluster, wire_between, write_cluster
from megatron.planner.command import main
from megatron.planner.islands import Transfer
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.report import flags, start, verdict
from megatron.planner.search import Bounds, choices, search
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
    alone = Predictor(small_run(4, training={"global_batch_size": 16}), SITES.part(2), VOCAB)
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


OUTERS = {2: ["outer=identity,outer-preset=diloco,every=5", SPEC, "outer=fixpoint,bits=4,every=20,fragments=4,delay=2"]}


def test_the_search_of_islands_leaves_nothing_faster_out() -> None:
    config = small_run(model={"num_layers": 4}, training={"global_batch_size": 8})
    predictor = Predictor(config, SITES, VOCAB)
    sets = ((), ("pp-forward=fixpoint,bits=4", "dp-grad=powersgd,rank=2"))
    found = search(predictor, sets, top=3, outers=OUTERS)
    fastest: dict[tuple[int, int, int], float] = {}
    bounds = Bounds(predictor, OUTERS)
    for choice in choices(config, SITES, sets, 2):
        for text in OUTERS[2]:
            one = predictor.predict(replace(choice, specs=(*choice.specs, text)))
            assert bounds.of(choice) <= one.seconds
            fastest[choice.layout] = min(one.seconds, fastest.get(choice.layout, math.inf))
    assert [one.seconds for one in found.best] == pytest.approx(sorted(fastest.values())[:3])
    assert {one.choice.islands for one in found.best} == {2}
    plain = search(predictor, sets, top=3)
    assert {one.choice.islands for one in plain.best} == {1}


def test_what_fills_memory_rules_islands_out() -> None:
    config = small_run()
    predictor = Predictor(config, SITES, VOCAB)
    one = search(predictor, ((),), top=1, outers=OUTERS).best[0]
    least = (one.memory_bytes - 1) / 2**30
    assert search(predictor, ((),), top=1, memory_gib=least, outers=OUTERS).best[0].choice != one.choice
    with pytest.raises(UserError, match="nothing fits"):
        search(predictor, ((),), top=1, memory_gib=1e-6, outers=OUTERS)


def _plan(folder: Path, capsys: pytest.CaptureFixture[str], cluster: Cluster, *words: str, **sections: Any) -> str:
    (folder / "run.yaml").write_text(small_run(**sections).to_yaml())
    (folder / "cluster.yaml").write_text(write_cluster(cluster))
    files = ["--config", str(folder / "run.yaml"), "--cluster", str(folder / "cluster.yaml")]
    assert main([*files, "--specs", "", *words, "--json", str(folder / "plan.json")]) == 0
    return capsys.readouterr().out


def _said(shown: str) -> str:
    (line,) = [line for line in shown.splitlines() if line.startswith("islands: ")]
    return line


def test_the_plan_says_whether_islands_are_worth_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Fast links have nothing to save; on slow ones sums in step are compressed.
    wide = {"hidden_size": 256}
    fast = _plan(tmp_path, capsys, replace(SITES, across=FAST, between_sites=FAST), model=wide)
    assert _said(fast).startswith("islands: not worth it: the fastest take ")
    slow = _plan(tmp_path, capsys, replace(SITES, between_sites=LinkSpec(0.05, 20.0)), model=wide)
    assert " x faster than one run over everything, at +" in _said(slow)
    assert ",in-step=compressed" in slow
    # Few layers, so that stages cannot be the way out, and a link that one sum at each step is too much for.
    long: dict[str, Any] = {"training": {"train_iters": 1000}, "model": {"num_layers": 1, "hidden_size": 256}}
    shown = _plan(tmp_path, capsys, SITES, **long)
    assert " x faster than one run over everything, at +" in _said(shown)
    best = json.loads((tmp_path / "plan.json").read_text())[1]
    assert best["choice"]["islands"] == 2
    assert best["outer"]["loss_percent"] <= 2
    assert "extrapolated: 2 islands, measured with 4" in shown
    none = _plan(tmp_path, capsys, SITES, "--max-loss-increase", "0.1", **long)
    assert "not worth it: none is predicted to cost at most 0.1% of the loss; the least is " in _said(none)
    short = _plan(tmp_path, capsys, SITES, training={"train_iters": 3})
    assert _said(short) == "islands: not worth it: the run is shorter than a round"
    assert "islands: " not in _plan(tmp_path, capsys, CLUSTER)


def test_a_set_of_a_user_is_tried_whatever_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = "outer=powersgd,rank=4,every=25"
    shown = _plan(tmp_path, capsys, SITES, "--specs", spec, "--top", "50", "--max-loss-increase", "0")
    rows = [line for line in shown.splitlines() if "2 islands" in line]
    assert rows
    assert all(spec in row and "  ?  " in row for row in rows)


def test_the_flags_of_islands_are_those_of_training(tmp_path: Path) -> None:
    predictor = Predictor(small_run(), SITES, VOCAB)
    one = search(predictor, ((),), top=1, outers={2: [SPEC]}).best[0]
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


def test_a_run_of_islands_is_predicted_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, Any] = {"islands": {"islands": 2, "island": 0, "islands_address": "localhost:29600"}}
    config = small_run(4, (SPEC,), **files)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    (tmp_path / "cluster.yaml").write_text(write_cluster(SITES))
    words = ["--config", str(tmp_path / "run.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main([*words, "--no-search"]) == 0
    shown = capsys.readouterr().out
    assert "2 islands, tp 1, pp 1, dp 4, 4 micro-batches of 1" in shown
    assert "33 iterations in step of " in shown
    assert main([*words, "--no-search", "--gpus", "9", "--sites", "1"]) == 2
    assert "--islands 2 does not divide the 9 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sites", "3"], "sites 3: 8 devices in nodes of 2"),
        (["--specs", "outer=zip"], "no compressor is named 'zip'"),
        (["--specs", "outer=identity,every=0"], "every"),
    ],
)
def test_what_is_wrong_of_sites_is_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(small_run().to_yaml())
    (tmp_path / "cluster.yaml").write_text(write_cluster(SITES))
    assert main(["--config", str(tmp_path / "run.yaml"), "--cluster", str(tmp_path / "cluster.yaml"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plan: error: ")
    assert says in line


def test_numbers_that_cannot_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in ((["--sites", "0"], "--sites 0: give"), (["--max-loss-increase", "nan"], "give a number of")):
        with pytest.raises(SystemExit) as ended:
            main(["--config", "x", "--cluster", "y", *words])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


def test_a_verdict_of_equals() -> None:
    config = small_run()
    one: Prediction = Predictor(config, SITES, VOCAB).predict(_choice())
    assert "not worth it" in verdict(one, one, "")
    assert verdict(replace(one, seconds=2 * one.seconds), one, "").startswith("islands: 2.00 x faster")
