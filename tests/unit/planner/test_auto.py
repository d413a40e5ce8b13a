"""The choice of ``--compress auto``, against a plain loop over all sets."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.safety.settings import read_card_specs
from megatron.base.errors import UserError
from megatron.compression.builtin import BUILTIN
from megatron.compression.ladder import Rung
from megatron.compression.plugins import build_registry
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.spec import point_name
from megatron.config.memory import format_bytes
from megatron.planner.auto import TRIAL_MARGIN, AutoChoice, AutoSearch, LossEstimate, MeasuredTraffic, fit_together
from megatron.planner.auto_report import report
from megatron.planner.candidates import CandidateSpec, candidate_specs, filter_by_budget, read_ladders
from megatron.planner.choice import Choice
from megatron.planner.compressor_search import MAX_TRIALS, WORTHWHILE, CompressorSearch
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.settings import list_free_settings
from tests.support.layer_codes import MODULE, TP_POINTS
from tests.unit.planner.support import CLUSTER, predictor_of, small_run

NODES = dataclasses.replace(CLUSTER, gpus_per_node=1)
SLOW = dataclasses.replace(NODES, across=dataclasses.replace(CLUSTER.across, gbit_per_s=0.05))
FAST = dataclasses.replace(NODES, across=CLUSTER.inside)
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 4, "use_distributed_optimizer": True}


class FakePredictor:
    """Predicts a second, of which passes take 0.65, less what each spec saves; and memory as what each spec needs.

    Bounds are below the predictions by a share ``slack``.
    """

    def __init__(self, saved_s: dict[str, float], memory_gib: dict[str, float], slack: float = 0.1) -> None:
        self.saved_s, self.memory_gib, self.slack, self.slowdown = saved_s, memory_gib, slack, 1.0
        self.cluster = NODES

    def _saved_s(self, choice: Choice, *prefixes: str) -> float:
        return sum(self.saved_s[spec] for spec in choice.specs if spec.startswith(prefixes))

    def passes_s(self, choice: Choice) -> float:
        return 0.65 - self._saved_s(choice, "pp-", "tp-", "ep-")

    def pass_bounds_s(self, choice: Choice) -> list[float]:
        return [(1.0 - self.slack) * self.passes_s(choice)]

    def least_update_s(self, choice: Choice) -> float:
        return (1.0 - self.slack) * (0.35 - self._saved_s(choice, "dp-", "embedding", "param-"))

    def seconds(self, choice: Choice) -> float:
        return (1.0 - self._saved_s(choice, "")) * self.slowdown

    def memory_bytes(self, choice: Choice) -> float:
        return 2**30 * (1.0 + sum(self.memory_gib[spec] for spec in choice.specs))

    def predict(self, choice: Choice) -> Prediction:
        seconds, nbytes = self.seconds(choice), self.memory_bytes(choice)
        prediction = SimpleNamespace(choice=choice, seconds=seconds, memory_bytes=nbytes, sent={"dp-grad": 4e6})
        return cast(Prediction, prediction)


candidates = st.lists(
    st.tuples(st.floats(-0.1, 0.3), st.floats(0.0, 0.6), st.sampled_from((0.0, 1.0))), min_size=1, max_size=4
)


@given(
    st.lists(candidates, min_size=1, max_size=3),
    st.floats(0.0, 1.0),
    st.sampled_from((0.5, 2.0)),
    st.sampled_from((0.0, 0.05, 0.5)),
)
def test_the_choice_is_the_mildest_of_the_fastest_sets(
    drawn: list[list[tuple[float, float, float]]], budget: float, memory_gib: float, slack: float
) -> None:
    """Against a loop over all sets, with the rule written out."""
    saved_s: dict[str, float] = {}
    needed: dict[str, float] = {}
    ladders: dict[Point, Sequence[CandidateSpec]] = {}
    for point, rungs in zip(Point, drawn, strict=False):
        for number, (saved, increase, gib) in enumerate(rungs):
            spec = f"{point.value}=c{number}"
            saved_s[spec], needed[spec] = saved, gib
            ladders[point] = [*ladders.get(point, []), CandidateSpec(spec, increase)]
    fake = FakePredictor(saved_s, needed, slack)
    search = AutoSearch(cast(Predictor, fake), Choice(1, 1, 1), ladders, budget, memory_gib, {})
    result = search.choose()

    allowed: list[tuple[float, float]] = []
    compressed_s, considered = [], 0
    for members in itertools.product(*([None, *ladder] for ladder in ladders.values())):
        chosen = [member for member in members if member is not None]
        increase = sum(member.increase for member in chosen)
        fits = 1.0 + sum(needed[member.spec] for member in chosen) <= max(memory_gib, 1.0)
        considered += increase <= budget
        if not chosen or (increase <= budget and fits):
            seconds = 1.0 - sum(saved_s[member.spec] for member in chosen)
            allowed.append((seconds, increase))
            compressed_s += [seconds] * bool(chosen)
    fastest_s = min(seconds for seconds, _ in allowed)
    fast = [(increase, seconds) for seconds, increase in allowed if seconds * (1 - WORTHWHILE) <= fastest_s]
    increase, seconds = (0.0, 1.0) if fastest_s >= 1 - WORTHWHILE else min(fast)
    assert result.considered == considered
    assert result.chosen.increase == pytest.approx(increase)
    assert result.chosen.seconds == pytest.approx(seconds)
    assert [point.point for point in result.points] == list(ladders)
    chosen = [point.candidate for point in result.points if point.candidate]
    assert sum(candidate.increase for candidate in chosen) == pytest.approx(increase)
    for point_choice in result.points:
        if point_choice.candidate is not None:
            assert point_choice.saved_s == pytest.approx(saved_s[point_choice.candidate.spec])

    contenders = search.contenders()
    slowest_s = fastest_s * (1 + TRIAL_MARGIN)
    compressed = sorted(seconds for seconds in compressed_s if seconds <= slowest_s)
    assert [not each.candidates for each in contenders] == [True] * bool(compressed) + [False] * len(contenders[1:])
    may_gain = bool(compressed) and compressed[0] <= 1 - WORTHWHILE
    assert len(contenders[1:]) == min(len(compressed), MAX_TRIALS if may_gain else 1)
    assert all(each.seconds <= slowest_s for each in contenders[1:])
    if may_gain:
        assert min(each.seconds for each in contenders[1:]) == pytest.approx(compressed[0])
    if result.chosen.candidates:
        assert result.chosen in contenders
    if len(compressed) > MAX_TRIALS and may_gain:  # all but the mildest of the fastest are the fastest
        assert sum(each.seconds > compressed[MAX_TRIALS - 1] for each in contenders[1:]) <= 1


def _search_of(saved_s: dict[str, float], increases: dict[str, float]) -> AutoSearch:
    """A search with one point and a base of 1 s."""
    fake = FakePredictor(saved_s, dict.fromkeys(saved_s, 0.0))
    ladder = [CandidateSpec(spec, increases[spec]) for spec in saved_s]
    return AutoSearch(cast(Predictor, fake), Choice(1, 1, 1), {Point.DP_GRAD: ladder}, 1.0, 2.0, {})


@pytest.mark.parametrize(
    ("trial_s", "gains", "expected"),
    [
        ((1.0, 0.9, 0.5), (True, True), "dp-grad=bold"),  # the prediction is 0.7 s and 0.69 s: mild
        ((1.0, 0.51, 0.5), (True, True), "dp-grad=mild"),
        ((1.0, 0.51, 0.5), (False, True), "dp-grad=bold"),
        ((1.0, 0.51, 0.5), (False, False), None),
        ((0.7, 0.9, 0.7), (False, False), None),
    ],
)
def test_trial_steps_outweigh_predictions(
    trial_s: tuple[float, ...], gains: tuple[bool, bool], expected: str | None
) -> None:
    search = _search_of({"dp-grad=mild": 0.3, "dp-grad=bold": 0.31}, {"dp-grad=mild": 0.1, "dp-grad=bold": 0.4})
    assert _chosen(search.choose()) == {Point.DP_GRAD: "dp-grad=mild"}
    contenders = search.contenders()
    assert [each.specs for each in contenders] == [[], ["dp-grad=mild"], ["dp-grad=bold"]]
    trials = [
        dataclasses.replace(each, trial_s=seconds, gains=gain)
        for each, seconds, gain in zip(search.calibrate(contenders, trial_s), trial_s, (False, *gains), strict=True)
    ]
    result = search.choose(trials)
    assert _chosen(result).get(Point.DP_GRAD) == expected
    text = report(result, 1.0)
    assert f"measured {result.chosen.trial_s:.3g} s an iteration, {trial_s[0]:.3g} s without" in text
    factor = statistics.median(s / predicted_s for s, predicted_s in zip(trial_s, (1.0, 0.7, 0.69), strict=True))
    assert search.find_set(["dp-grad=bold"], {}).prediction.seconds == pytest.approx(0.69 * factor)
    assert f"multiplied by {factor:.2f}, the median ratio of trial steps to predictions\n" in text
    assert f"trial steps: {trial_s[2]:.3g} s (predicted: {0.69 * factor:.3g} s) dp-grad=bold" in text
    if expected is None:
        assert f"nothing: bold was to save {0.31 * factor:.3g} s, but trial steps do not confirm this" in text


def test_sets_of_another_rank_are_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the choice among them is made without one."""
    monkeypatch.setattr(CompressorSearch, "_find_fastest", lambda _: pytest.fail("searches"))
    search = _search_of({"dp-grad=mild": 0.3, "dp-grad=bold": 0.31}, {"dp-grad=mild": 0.1, "dp-grad=bold": 0.4})
    trials = search.calibrate([search.find_set(specs, {}) for specs in ([], ["dp-grad=bold"])], [1.2, 0.8])
    trials = [dataclasses.replace(each, trial_s=each.seconds, gains=bool(each.candidates)) for each in trials]
    assert search.choose(trials).chosen.specs == ["dp-grad=bold"]
    with pytest.raises(pytest.fail.Exception, match="searches"):
        search.contenders()


def test_engines_of_timed_sets_are_kept_together_where_they_fit() -> None:
    """Each needs 1 GiB, of 80% of the memory."""
    search = _search_of({"dp-grad=mild": 0.3}, {"dp-grad=mild": 0.1})
    assert fit_together(search.contenders(), 2.6)
    assert not fit_together(search.contenders(), 2.4)
    assert fit_together([], 1.0)


def test_candidates_that_alone_exceed_the_budget_are_neither_measured_nor_predicted() -> None:
    """The predictor would fail on them."""
    dear = [CandidateSpec("dp-grad=dear", 1.1), CandidateSpec("dp-grad=bold", 1.0)]
    ladders: dict[Point, Sequence[CandidateSpec]] = {Point.DP_GRAD: dear, Point.PP_FWD: dear[:1]}
    assert candidate_specs(filter_by_budget(ladders, 1.0)) == ["dp-grad=bold"]
    fake = FakePredictor({"dp-grad=bold": 0.3}, {"dp-grad=bold": 0.0})
    search = AutoSearch(cast(Predictor, fake), Choice(1, 1, 1), ladders, 1.0, 2.0, {})
    result = search.choose()
    assert _chosen(result) == {Point.DP_GRAD: "dp-grad=bold"}
    assert result.points[1].reason == "each compressor costs more than 1% of loss"


def test_nothing_is_tried_where_compressors_cannot_gain() -> None:
    search = _search_of({"dp-grad=slow": -TRIAL_MARGIN - 0.01}, {"dp-grad=slow": 0.1})
    assert search.contenders() == []
    search = _search_of({"dp-grad=slow": -TRIAL_MARGIN + 0.01}, {"dp-grad=slow": 0.1})
    assert len(search.contenders()) == 2


@pytest.mark.parametrize(("saved_s", "count"), [(WORTHWHILE + 0.001, 2), (WORTHWHILE - 0.001, 1)])
def test_a_single_set_is_tried_where_none_is_predicted_to_gain(saved_s: float, count: int) -> None:
    search = _search_of({"dp-grad=mild": saved_s, "dp-grad=bold": saved_s}, {"dp-grad=mild": 0.1, "dp-grad=bold": 0.4})
    assert len(search.contenders()[1:]) == count


def _chosen(result: AutoChoice) -> dict[Point, str]:
    return {choice.point: choice.candidate.spec for choice in result.points if choice.candidate is not None}


def _auto(
    cluster: Any,
    budget: float = 100.0,
    specs: tuple[str, ...] = (),
    explicit: Sequence[str] = ("parallel.overlap_grad_reduce", "parallel.pipeline_schedule"),
    **parallel: Any,
) -> AutoChoice:
    config = small_run(specs=specs, model={"hidden_size": 256}, parallel=STAGES | parallel)
    predictor, choice = predictor_of(config, cluster)
    ladders = read_ladders(config, choice, cluster)
    free_settings = list_free_settings(config, choice, explicit)
    return AutoSearch(predictor, choice, ladders, budget, 40.0, free_settings).choose()


def test_slow_links_are_compressed_and_fast_links_are_not() -> None:
    slow, fast = _auto(SLOW), _auto(FAST)
    assert {Point.PP_FWD, Point.PP_BWD, Point.DP_GRAD} <= _chosen(slow).keys()
    assert slow.chosen.seconds < 0.5 * slow.plain.seconds
    assert not _chosen(fast)
    assert fast.chosen == fast.plain
    assert all(point.reason for point in fast.points)


def test_the_budget_holds_and_a_larger_one_is_never_slower() -> None:
    seconds = []
    for budget in (1e-9, 0.1, 0.5, 2.0):
        result = _auto(SLOW, budget)
        assert result.chosen.increase <= budget
        seconds.append(result.chosen.seconds)
    assert all(later <= earlier / (1 - WORTHWHILE) for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_points_of_the_user_and_without_traffic_are_left_alone() -> None:
    user_specs = ("dp-grad=cast", "pp-forward=none")
    result = _auto(SLOW, specs=user_specs)
    assert {Point.DP_GRAD, Point.PP_FWD}.isdisjoint(point.point for point in result.points)
    assert result.chosen.prediction.choice.specs[:2] == user_specs
    config, single = small_run(world=1), dataclasses.replace(CLUSTER, gpus=1)
    assert not read_ladders(config, predictor_of(config, single)[1], single)
    single_stage = _auto(SLOW, pipeline_model_parallel_size=1, use_distributed_optimizer=False)
    assert {point.point for point in single_stage.points} == {Point.DP_GRAD}


@pytest.mark.parametrize(
    ("specs", "points"),
    [
        ([], EXPERT_POINTS),
        (["ep-dispatch=cast"], (Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD)),
        (["experts=default"], ()),
    ],
)
def test_points_inside_layers_take_part(specs: list[str], points: tuple[Point, ...]) -> None:
    """But not those with a spec of the user, of several points either."""
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    compression = {"compress": ["auto", *specs], "compress_module": [MODULE]}
    config = small_run(model={"num_experts": [4]}, parallel=layout, compression=compression)
    ladders = read_ladders(config, predictor_of(config)[1], CLUSTER)
    offered = {point: [candidate.spec for candidate in ladder] for point, ladder in ladders.items()}
    for point in (*TP_POINTS, *EXPERT_POINTS):
        codes = [f"{point.value}=codes,bits=8", f"{point.value}=codes,bits=4"]
        assert set(codes) <= set(offered[point]) if point in (*TP_POINTS, *points) else point not in offered


def test_compressors_that_training_refuses_are_no_candidates() -> None:
    """The sharded optimizer refuses the fused embedding; without it, nothing gathers parameters."""
    config = small_run(parallel=STAGES)
    sharded = read_ladders(config, predictor_of(config)[1], CLUSTER)
    assert Point.EMBED_GRAD not in sharded
    assert Point.PARAM_GATHER in sharded
    config = small_run(parallel=STAGES | {"use_distributed_optimizer": False})
    replicated = read_ladders(config, predictor_of(config)[1], CLUSTER)
    assert Point.PARAM_GATHER not in replicated
    assert [candidate.spec for candidate in replicated[Point.EMBED_GRAD]] == ["embedding=none,fused=on"]


def test_quantizers_with_too_much_noise_are_no_candidates() -> None:
    """2-bit gradients leave 0.683 of their norm in the residual; PowerSGD, which quantizes nothing, 3.34 and more."""
    config = small_run()
    ladder = read_ladders(config, predictor_of(config)[1], CLUSTER)[Point.DP_GRAD]
    residuals = {candidate.spec.partition("=")[2]: candidate.residual for candidate in ladder}
    assert residuals["fixpoint,bits=4,error-feedback=on"] == 0.161
    assert not any(text.startswith("fixpoint,bits=2") for text in residuals)
    assert any(text.startswith("powersgd") and (residual or 0.0) > 3 for text, residual in residuals.items())
    assert any(rung.residual == 0.683 for rung in build_registry([])["fixpoint"].ladder[Point.DP_GRAD])


def test_sums_in_two_levels_need_several_replicas_on_several_nodes() -> None:
    """Two nodes of four devices: eight replicas of a device; eight nodes; one node; stages that fill nodes."""
    config = small_run()
    levels = "dp-grad=fixpoint,levels=8/4,error-feedback=on"
    for gpus_per_node, expected in ((4, True), (1, False), (8, False)):
        cluster = dataclasses.replace(CLUSTER, gpus_per_node=gpus_per_node)
        ladder = read_ladders(config, predictor_of(config, cluster)[1], cluster)[Point.DP_GRAD]
        assert (levels in [candidate.spec for candidate in ladder]) == expected
    config = small_run(parallel={"pipeline_model_parallel_size": 2})
    ladder = read_ladders(config, predictor_of(config)[1], CLUSTER)[Point.DP_GRAD]
    assert levels not in [candidate.spec for candidate in ladder]


def test_the_report_names_each_point_and_the_flags() -> None:
    result = _auto(SLOW, 0.5)
    text = report(result, 0.5)
    flags = " ".join(f"--compress {spec}" for spec in _chosen(result).values())
    assert f"the same by hand: {flags}" in text
    (card_specs,) = re.findall(r"make safety-card ARGS=\"--short --spec '(.*)'\"", text)
    assert card_specs == " ".join(_chosen(result).values())
    assert read_card_specs(card_specs, 150).keys() == _chosen(result).keys()
    for choice in result.points:
        assert f"\n  {choice.point.value} " in text
    links = f"links: 0.05 Gb/s and {SLOW.across.latency_us:,.0f} us between nodes; memory left without compressors: "
    left_gib = SLOW.device.memory_gib - result.plain.prediction.memory_bytes / 2**30
    assert f"\n  {links}{left_gib:.3g} of {SLOW.device.memory_gib:.3g} GiB (predicted)\n" in text
    sent = format_bytes(result.plain.prediction.sent["pp-forward"])
    assert re.search(rf"\n  pp-forward +{sent} +\S+: predicted to save", text)
    assert "\n  not switched on: --flag would save 4%" in report(result, 0.5, ["--flag would save 4%"])
    assert re.search(r"nothing: (\S+ would save|coding would take longer)", report(_auto(FAST), 100.0))


def test_the_report_shows_what_was_measured() -> None:
    search = _search_of({"dp-grad=mild": 0.3, "dp-grad=bold": 0.31}, {"dp-grad=mild": 0.1, "dp-grad=bold": 0.2})
    assert "\n  dp-grad                     4 MB        mild: predicted to save 0.3 s" in report(search.choose(), 1.0)
    plain, mild, bold = search.contenders()
    trials = [
        dataclasses.replace(plain, trial_s=2.0),
        dataclasses.replace(mild, trial_s=1.0, gains=True),
        dataclasses.replace(bold, trial_s=0.9),
    ]
    estimate = LossEstimate(["dp-grad=mild"], 0.7, None, 1.0)
    result = dataclasses.replace(search.choose(trials), estimate=estimate)
    text = report(dataclasses.replace(result, traffic={Point.DP_GRAD: MeasuredTraffic(12.3e6, 0.6)}), 1.0)
    assert "validation loss at most 0.70% higher" in text
    assert "\n  point                sent a step waits  choice\n" in text
    assert "\n  dp-grad                  12.3 MB   60%  mild: predicted to save" in text
    assert "all points together" not in text  # nothing was measured
    idle = report(dataclasses.replace(result, traffic={Point.PP_FWD: MeasuredTraffic(1.0, 1.0)}), 1.0)
    assert "\n  dp-grad                  0 bytes    0%  mild" in idle


def test_a_safety_card_has_no_compressor_of_a_module() -> None:
    """Its command does not know them."""
    saved_s = {"pp-forward=mine,bits=4": 0.3, "dp-grad=cast": 0.3}
    ladders = {Point(point_name(spec)): [CandidateSpec(spec, 0.1)] for spec in saved_s}
    fake = cast(Predictor, FakePredictor(saved_s, dict.fromkeys(saved_s, 0.0), 0.0))
    search = AutoSearch(fake, Choice(1, 1, 1), ladders, 0.5, 1.0, {})
    text = report(search.choose(), 0.5)
    assert "--spec 'dp-grad=cast'" in text
    assert "the same by hand: --compress pp-forward=mine,bits=4 --compress dp-grad=cast" in text


def test_the_highest_increase_is_the_end_of_a_confidence_interval() -> None:
    """2.920 * 0.1 / sqrt(3) above the mean, by a table of Student's t distribution, and half of the mean for other
    models."""
    end = 0.2 + math.hypot(2.920 * 0.1 / math.sqrt(3), 0.1)
    assert Rung("", {9: (0.1, 0.2, 0.3)}).highest_increase(9) == pytest.approx(end)
    assert Rung("", {9: (-0.1, 0.0, 0.1)}).highest_increase(9) == pytest.approx(2.920 * 0.1 / math.sqrt(3))
    assert Rung("", {9: (-1.0, -1.1, -0.9)}).highest_increase(9) == 0.0


def test_costs_between_two_lengths_are_interpolated_over_their_logarithm() -> None:
    rung = Rung("", {1000: (0.2, 0.2), 250: (0.9, 0.7)})
    assert [rung.mean_increase(n) for n in (10, 250, 500, 1000, 10_000)] == pytest.approx([0.8, 0.8, 0.5, 0.2, 0.2])
    ends = [0.8 + math.hypot(0.6314, 0.4), 0.5 + math.hypot(0.6314 / 2, 0.25), 0.3]
    assert [rung.highest_increase(n) for n in (10, 500, 1000)] == pytest.approx(ends)
    assert rung.highest_increase(None) == pytest.approx(0.3)


PLUG_IN = """
from megatron.compression.cast import CastConfig, CastRounds
from megatron.compression.points import Point
from megatron.compression.ladder import Rung
from megatron.compression.registry import Registration

def register(registry):
    rungs = (Rung(lambda hidden: f"warmup={hidden}", {1000: (0.1, 0.1)}), Rung("", {1000: (0.2, 0.4)}))
    ladder = {Point.DP_GRAD: rungs}
    registry.register("mine", Registration(CastConfig, rounds=CastRounds, ladder=ladder))
"""


def test_a_compressor_of_a_module_takes_part(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUG_IN)
    config = small_run(parallel=STAGES, compression={"compress": ["auto"], "compress_module": [tmp_path / "mine.py"]})
    candidates = read_ladders(config, predictor_of(config)[1], CLUSTER)[Point.DP_GRAD]
    increases = {candidate.spec: candidate.increase for candidate in candidates}
    assert increases["dp-grad=mine,warmup=64"] == pytest.approx(0.15)
    assert increases["dp-grad=mine"] == pytest.approx(0.3 + math.hypot(6.314 * 0.1, 0.15))


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        ('(Rung("", (0.1, 0.2)),)', "a rung has increases by the number of iterations, such as {1000: (0.31, 0.12)}"),
        ('(Rung("", {9: (0.1,)}),)', "a rung has the increases of at least two runs"),
        ('(Rung("", {9: (0.1, 0.2)}),) * 9', "mine has 9 rungs at dp-grad; declare at most 8"),
        ('("bits=4",)', "mine: a ladder has tuples of Rung by Point, not <Point.DP_GRAD: 'dp-grad'>: ('bits=4',)"),
        ('rungs, "dp-grad": ()', "mine: a ladder has tuples of Rung by Point, not 'dp-grad': ()"),
        ('(Rung("bitz=3", {9: (0.1, 0.2)}),)', "mine has no option 'bitz'"),
        (
            "(Rung(lambda hidden: {}[hidden], {9: (0.1, 0.2)}),)",
            "mine: options of its ladder at dp-grad cannot be read: KeyError: 64 (mine.py, line 9)",
        ),
    ],
)
def test_a_ladder_that_cannot_be_is_refused(ladder: str, message: str, tmp_path: Path) -> None:
    text = PLUG_IN.replace("rungs}", ladder + "}", 1)
    (tmp_path / "mine.py").write_text(text)
    config = small_run(parallel=STAGES)
    compression = dataclasses.replace(config.compression, compress_module=[str(tmp_path / "mine.py")])
    with pytest.raises(UserError, match=re.escape(message)):
        read_ladders(dataclasses.replace(config, compression=compression), predictor_of(config)[1], CLUSTER)


def test_pipeline_messages_cost_once_for_each_boundary() -> None:
    """Their costs were measured between two stages."""

    def increases(**parallel: Any) -> dict[Point, list[float]]:
        config = small_run(parallel={"use_distributed_optimizer": True, **parallel})
        ladders = read_ladders(config, predictor_of(config, NODES)[1], NODES)
        costs = ((point, [(each.increase, each.mean_increase) for each in ladder]) for point, ladder in ladders.items())
        return {point: [cost for pair in pairs for cost in pair] for point, pairs in costs}

    two_stages = increases(pipeline_model_parallel_size=2)
    four_stages = increases(pipeline_model_parallel_size=4)
    virtual_stages = increases(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    for point, expected in two_stages.items():
        factor = 3 if point in (Point.PP_FWD, Point.PP_BWD) else 1
        for costs in (four_stages[point], virtual_stages[point]):
            assert costs == pytest.approx([factor * cost for cost in expected])


def test_every_rung_is_a_spec_with_evidence() -> None:
    points = {point for registration in BUILTIN.values() for point in registration.ladder}
    assert points == set(Point) - {Point.OUTER, Point.OPTIMIZER, Point.CONTROL}
    for name, registration in BUILTIN.items():
        for point, rungs in registration.ladder.items():
            assert len(rungs) <= 8
            for rung in rungs:
                registration.check_serves(point, name)
                assert rung.spec(point, name, 64).startswith(f"{point.value}={name}")
                assert all(len(values) >= 2 for values in rung.increases.values())
