"""Checks of what automatically chosen compressors cost in loss: measured costs, gentler settings, and resumed runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from megatron.base.values import Values
from megatron.checkpoint.certificate import MAX_INCREASE, LossCheck
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec
from megatron.planner.candidates import CandidateSpec
from megatron.training.assembly import Engines
from megatron.training.evaluation import evaluate
from megatron.training.flushless import complete_steps
from megatron.training.guarded_point import LossMeasurement, guard_point
from megatron.training.loss_guard import CALM_CHECKS, LossGuard
from megatron.training.saved_choice import describe_choice, restore_choice, specs_in_use
from megatron.training.saved_run import find_saved
from megatron.training.step import take_batches
from megatron.training.timers import Timers
from megatron.training.traffic import TrafficMeter
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import merge, tiny_batches, tiny_checkpoints, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

STAGES: dict[str, dict[str, Any]] = {"parallel": {"pipeline_model_parallel_size": 2}}
FOUR_BITS = "dp-grad=fixpoint,bits=4,error-feedback=on"
HARMFUL = """
from dataclasses import dataclass

from megatron.compression.cast import CastCodec, CastConfig
from megatron.compression.ladder import Rung
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration


@dataclass(frozen=True)
class ScaledConfig(CastConfig):
    \"\"\"Half precision of scaled numbers.\"\"\"

    factor: float = opt(1.0, "factor of the numbers")


class ScaledCodec(CastCodec):
    def encode(self, x, state, key):
        return super().encode(x * self.config.factor, state, key)


def register(registry):
    factors = (1.0, 0.02, 0.3)
    rungs = tuple(Rung(f"factor={factor}", {1000: (0.001 + i / 1000,) * 2}) for i, factor in enumerate(factors))
    ladder = dict.fromkeys((Point.PP_FWD, Point.EP_DISPATCH_FWD, Point.EP_COMBINE_FWD), rungs)
    registry.register("scaled", Registration(ScaledConfig, codec=ScaledCodec, ladder=ladder))
"""


def _auto(specs: list[str], module: str | None = None, budget: float = 0.5) -> dict[str, dict[str, Any]]:
    modules = [] if module is None else [module]
    return {"compression": {"compress": ["auto", *specs], "compress_module": modules, "max_loss_increase": budget}}


def _guard(engines: Engines, saved: Mapping[str, Values] = MappingProxyType({})) -> LossGuard:
    batches = tiny_batches(engines.config, engines.topology, False, start=5000)
    count = 4 // engines.topology.layout.dp
    return LossGuard(engines, take_batches(batches, count, engines.topology.device), RunLength(1000), saved)


def _check_harmful_codec(module: str) -> tuple[dict[str, Any], str | None, float, list[float], list[str]]:
    """Trains, checks, and trains on; beside it, the increase by plain evaluations of two other engines with the same
    weights, and the losses of the next step with the gentler codec from now on and from the start."""
    changes = merge(STAGES, _auto(["pp-forward=scaled,factor=0.02"], module))
    engines = tiny_engines(changes)
    tiny_train(engines, 7)
    guard = _guard(engines)
    expected = []
    for specs in ([], ["pp-forward=scaled,factor=0.02,eval=on"]):
        other = tiny_engines(merge(STAGES, {"compression": {"compress": specs, "compress_module": [module]}}))
        _copy_weights(engines, other)
        batches = tiny_batches(other.config, other.topology, False, start=5000)
        expected.append(evaluate(other, batches, 1, 4, 0).losses["lm loss"])
    gentle = tiny_engines(merge(STAGES, _auto(["pp-forward=scaled,factor=1.0"], module)))
    _copy_weights(engines, gentle)
    finding = guard.check(8)
    losses = [tiny_train(each, 1, first=7).losses[0] for each in (engines, gentle)]
    specs = describe_choice(engines.config, engines.topology.layout, engines.plan)["specs"]
    again = guard.check(9)
    increases = finding.values["expected_increase"], again.values["expected_increase"]
    assert guard.checks == [LossCheck(8, increases[0], "pp-forward"), LossCheck(9, increases[1])]
    assert again.values["points"]["pp-forward"] < 0.5  # the gentler codec only rounds
    assert again.line is None
    return dict(finding.values), finding.line, 100.0 * (expected[1] / expected[0] - 1.0), losses, specs


def _copy_weights(source: Engines, target: Engines) -> None:
    for stage, other in zip(source.stages, target.stages, strict=True):
        other.load_state_dict(stage.state_dict())


def test_a_harmful_codec_is_measured_and_takes_its_gentler_setting(tmp_path: Path) -> None:
    module = tmp_path / "scaled.py"
    module.write_text(HARMFUL)
    results = run_ranks(2, _check_harmful_codec, str(module))
    values, line, increase, losses, specs = results[1]
    assert increase > 0.5
    assert values["points"]["pp-forward"] == pytest.approx(increase, rel=1e-6)
    assert values["eased"] == "pp-forward"
    assert line is not None
    assert f"the loss is expected to be {increase:.2f}% higher (pp-forward {increase:.2f}%)" in line
    assert line.endswith("above --max-loss-increase 0.5: pp-forward goes on with scaled,factor=1.0")
    assert losses[0] == losses[1]
    assert specs == ["pp-forward=scaled,factor=1.0"]
    assert results[0][:2] == results[1][:2]


def _check_residuals(
    budget: float, declared_residual: float | None = None
) -> tuple[list[dict[str, Any]], list[str | None], float, list[Any]]:
    """Checks three times, with steps between."""
    engines = tiny_engines(merge(_auto([FOUR_BITS], budget=budget)))
    ratios = []
    meter = TrafficMeter(engines)
    tiny_train(engines, 3, after_step=lambda _: ratios.append(meter.collect(1)[0]["dp-grad"].residual))
    ratio, guard = ratios[-1], _guard(engines)
    if declared_residual is not None:
        guarded = guard._points[Point.DP_GRAD]
        candidate, spec = guarded.settings[0]
        guarded.settings[0] = replace(candidate, residual=declared_residual), spec
    assert ratio is not None
    values, lines, residuals = [], [], []
    for check in range(3):
        finding = guard.check(1)
        values.append(dict(finding.values))
        lines.append(finding.line)
        tiny_train(engines, 2, first=3 + 2 * check)
        states = [state for reducer in engines.sync.reducers for _, state in reducer.residuals()]
        residuals.append(sum(float(state.tensors[RESIDUAL].norm()) for state in states if RESIDUAL in state.tensors))
    choice = describe_choice(engines.config, engines.topology.layout, engines.plan)
    return values, lines, ratio, [residuals, choice["specs"], specs_in_use(choice)]


def test_residuals_beyond_those_of_the_evidence_raise_the_cost() -> None:
    """The mean increase of 4-bit gradients in 1,000 iterations is 0.2553%; 0.5109% counts at least, for any model."""
    (values, _, _, _), _ = run_ranks(2, _check_residuals, 100.0)
    assert values[0]["points"]["dp-grad"] == pytest.approx(0.5109, rel=1e-3)
    (values, lines, ratio, _), other = run_ranks(2, _check_residuals, 100.0, 0.05)
    assert ratio == pytest.approx(0.17, rel=0.1)
    assert values[0]["points"]["dp-grad"] == pytest.approx(0.2553 * (ratio / 0.05) ** 2, rel=1e-3)
    assert lines == [None] * 3
    assert (values, lines) == other[:2]


def _check_when_resumed(folder: Path) -> list[dict[str, float]]:
    """Costs by a check after the step that follows a save, of the run that saved and of one that resumes it."""
    changes = merge(_auto([FOUR_BITS], budget=100.0), {"parallel": {"delay": 1}})
    costs = []
    for section in ({"save": str(folder)}, {"load": str(folder)}):
        engines = tiny_engines(merge(changes, {"checkpoint": section}))
        checkpoints = tiny_checkpoints(engines, 2 if "save" in section else 0)
        if "save" in section:
            tiny_train(engines, 2)
            checkpoints.save()
        else:
            saved = find_saved(checkpoints.config, engines.topology, checkpoints.log)
            assert saved is not None
            checkpoints.load(saved)
        tiny_train(engines, 1, first=2)
        complete_steps(engines, Timers())
        guard = _guard(engines)
        guarded = guard._points[Point.DP_GRAD]
        guarded.settings[0] = replace(guarded.settings[0][0], residual=0.05), guarded.settings[0][1]
        costs.append(guard.check(1).values["points"])
    return costs


def test_a_resumed_run_measures_the_residuals_of_delayed_gradients(tmp_path: Path) -> None:
    """Whose reduction began in the last step; the gradients in the checkpoint were reduced before."""
    (costs, resumed), others = run_ranks(2, _check_when_resumed, tmp_path)
    assert resumed == costs
    assert costs["dp-grad"] > 1.0
    assert others == [costs, resumed]


def test_the_settings_of_a_compressor_are_followed_to_exact_traffic() -> None:
    """The first exact reduction adds the residual."""
    (values, lines, _, (residuals, specs, used_specs)), _ = run_ranks(2, _check_residuals, 1e-9)
    assert [entry["eased"] for entry in values] == ["dp-grad", "dp-grad", None]
    assert lines[0] is not None
    assert lines[1] is not None
    assert lines[0].endswith("dp-grad goes on with fixpoint,bits=8,error-feedback=on")
    assert lines[1].endswith("dp-grad goes on uncompressed")
    assert residuals[0] > 0.0
    assert residuals[1] == residuals[2] == 0.0
    assert specs == ["dp-grad=fixpoint,bits=8,error-feedback=on"]  # whose states the checkpoint keeps
    assert used_specs == []


def _check_bolder_codec(module: str) -> list[tuple[int, str | None, list[int]]]:
    """Setting after each check, the change in the log, and how often settings have exceeded the budget."""
    engines = tiny_engines(merge(STAGES, _auto(["pp-forward=scaled,factor=0.02"], module)))
    tiny_train(engines, 7)
    guard, steps = _guard(engines), []

    def check(budget: float, count: int = 1) -> float:
        guard._budget = budget
        for _ in range(count):
            finding = guard.check(1)
            change = finding.line and finding.line.partition(f"{budget:g}: ")[2]
            guarded = guard._points[Point.PP_FWD]
            steps.append((finding.values["settings"]["pp-forward"], change, list(guarded.breaks)))
            choice = describe_choice(engines.config, engines.topology.layout, engines.plan)
            assert choice["specs"] == [guarded.settings[guarded.position][0].spec]
            assert (finding.values["emboldened"] is not None) == ("far below" in (finding.line or ""))
        return float(finding.values["points"]["pp-forward"])

    increase = check(0.5)
    check(increase * 1.4, 6)  # within the budget, but not far below it
    check(increase * 2.0, 4)
    check(increase * 1.4)  # not in a row
    check(increase * 2.0, 5)
    assert check(increase * 1.01) == pytest.approx(increase, rel=1e-6)  # bold again, and within the budget
    check(increase * 2.0, 5)  # and never beyond what was chosen
    check(increase * 0.9)
    check(increase * 2.0, 6)
    return steps


def test_a_setting_comes_back_when_its_harm_has_long_been_far_below_the_budget(tmp_path: Path) -> None:
    """Not one that has exceeded the budget twice."""
    module = tmp_path / "scaled.py"
    module.write_text(HARMFUL)
    steps, other = run_ranks(2, _check_bolder_codec, str(module))
    assert steps == other
    gentler, bolder = "pp-forward goes on with scaled,factor=1.0", "pp-forward goes on with scaled,factor=0.02"
    once, twice = [1, 0], [2, 0]
    assert steps == [
        (1, gentler, once),
        *[(1, None, once)] * 15,
        (0, bolder, once),
        *[(0, None, once)] * 6,
        (1, gentler, twice),
        *[(1, None, twice)] * 6,
    ]


def _check_bolder_gradients() -> tuple[list[int], list[float], list[float]]:
    """Settings and costs of a check after each step: 4 bits look harmful at first; then 8 bits look so harmful that 4
    would cost too much; from step 7 on less so. Beside them, the residual over the gradient in each step."""
    engines = tiny_engines(_auto([FOUR_BITS], budget=0.52))
    ratios: list[float | None] = []
    guard, meter = _guard(engines), TrafficMeter(engines)
    guarded = guard._points[Point.DP_GRAD]
    (four, four_spec), (eight, eight_spec) = guarded.settings

    def declare(four_residual: float, eight_residual: float) -> None:
        guarded.settings[0] = replace(four, residual=four_residual), four_spec
        guarded.settings[1] = replace(eight, residual=eight_residual), eight_spec

    positions, costs = [], []
    for step in range(14):
        declare(0.161 if step else 0.05, 0.011 if step >= 7 else 0.0075)
        tiny_train(engines, 1, first=step, after_step=lambda _: ratios.append(meter.collect(1)[0]["dp-grad"].residual))
        finding = guard.check(1)
        positions.append(finding.values["settings"]["dp-grad"])
        costs.append(finding.values["points"]["dp-grad"])
    return positions, costs, [ratio for ratio in ratios if ratio is not None]


def test_gradients_go_back_to_fewer_bits_by_the_residuals_of_more() -> None:
    """With 8 bits, whose residual stands for that of 4: 0.2553% in proportion must be below 2/3 of 0.52%."""
    (positions, costs, ratios), other = run_ranks(2, _check_bolder_gradients)
    assert (positions, costs) == other[:2]
    assert positions == [1] * 11 + [0] * 3
    assert all(0.2553 * (ratio / 0.0075) ** 2 > 0.52 * 2 / 3 for ratio in ratios[1:7])
    assert all(0.2553 * (ratio / 0.011) ** 2 < 0.52 * 2 / 3 for ratio in ratios[7:12])
    assert costs[12] == pytest.approx(0.5109, rel=1e-3)  # 4 bits, whose residual is as declared


RESUMED: dict[str, tuple[str, float, dict[str, dict[str, Any]]]] = {
    "4 to 8 bits": (FOUR_BITS, 0.2, {}),
    "8 bits to exact": ("dp-grad=fixpoint,bits=8,error-feedback=on", 1e-9, {}),
    "parameters to exact": (
        "param-gather=fixpoint,bits=4,group=2048",
        1e-9,
        {"parallel": {"use_distributed_optimizer": True}},
    ),
}
"""Chosen spec, budget, and other changes."""


def _resume_after_a_change(folder: str, goes_back: bool) -> dict[str, tuple[list[float], list[float], list[str]]]:
    """Losses of four steps after a check and a save, without a break and in a resumed run, and its warnings; after a
    change to a gentler setting, or also after one back to the setting before."""
    losses = {}
    for number, (name, (spec, budget, changes)) in enumerate(RESUMED.items()):
        saved_folder = f"{folder}{number}{goes_back}"
        base = merge(changes, {"checkpoint": {"save": saved_folder, "load": saved_folder}})
        engines = tiny_engines(merge(base, _auto([spec], budget=budget)))
        tiny_train(engines, 3)
        guard, point = _guard(engines), spec.partition("=")[0]
        assert guard.check(1).values["eased"] == point
        done = 3
        if goes_back:
            guard._budget = 100.0
            for _ in range(CALM_CHECKS):
                tiny_train(engines, 1, first=done)
                done += 1
                finding = guard.check(1)
            assert finding.values["emboldened"] == point
        checkpoints = tiny_checkpoints(engines, done, guard)
        checkpoints.save()
        checkpoints.close()
        whole = tiny_train(engines, 4, first=done).losses
        kept = describe_choice(engines.config, engines.topology.layout, engines.plan)["specs"]
        resumed = tiny_engines(merge(base, _auto(kept, budget=budget)))
        lines: list[str] = []
        saved = find_saved(resumed.config.checkpoint, resumed.topology, lines.append)
        assert saved is not None
        loaded = tiny_checkpoints(resumed)
        loaded.log = lines.append
        checks = restore_choice(saved, resumed.config, resumed.plan)
        loaded.load(saved)
        resumed_guard = _guard(resumed, checks.loss)
        assert resumed_guard.state_dict() == guard.state_dict()
        positions = [each._points[Point(point)].position for each in (guard, resumed_guard)]
        assert positions == [0, 0] if goes_back else [1, 1]
        losses[name] = whole, tiny_train(resumed, 4, first=done).losses, [line for line in lines if "warning" in line]
    return losses


@pytest.mark.parametrize("goes_back", mark_repeats([False, True], keep=[True]))
def test_a_run_that_resumes_right_after_a_change_is_exact(tmp_path: Path, goes_back: bool) -> None:
    for losses in run_ranks(2, _resume_after_a_change, str(tmp_path / "saved"), goes_back):
        for whole, resumed, warnings in losses.values():
            assert whole == resumed
            assert not warnings


def _check_joint_harm(module: str) -> tuple[dict[str, Any], dict[str, float], dict[str, Any], str | None]:
    """A check of two forward points, with what they cost by plain evaluations of engines with the same weights; and a
    check of losses that are far higher with both than with each."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32}
    layout = {"parallel": {"expert_model_parallel_size": 2}, "model": experts}
    points = Point.EP_DISPATCH_FWD, Point.EP_COMBINE_FWD
    specs = {point.value: f"{point.value}=scaled,factor=0.3" for point in points}
    engines = tiny_engines(merge(layout, _auto([*specs.values()], module, 100.0)))
    tiny_train(engines, 7)
    losses = {}
    for name, used in {"exact": [], **{key: [spec] for key, spec in specs.items()}, "both": [*specs.values()]}.items():
        compress = [f"{spec},eval=on" for spec in used]
        other = tiny_engines(merge(layout, {"compression": {"compress": compress, "compress_module": [module]}}))
        _copy_weights(engines, other)
        batches = tiny_batches(other.config, other.topology, False, start=5000)
        losses[name] = evaluate(other, batches, 1, 2, 0).losses["lm loss"]
    increases = {name: 100.0 * (loss / losses["exact"] - 1.0) for name, loss in losses.items()}
    guard = _guard(engines)
    values = dict(guard.check(1).values)
    guard._budget = 1.0
    made_up_losses = {(): 1.0, points[:1]: 1.002, points[1:]: 1.003, points: 1.02}
    guard._evaluate_loss = made_up_losses.__getitem__  # type: ignore[assignment, method-assign]
    finding = guard.check(1)
    return values, increases, dict(finding.values), finding.line


def test_forward_points_are_also_measured_together(tmp_path: Path) -> None:
    """What they cost together counts if it is more than the sum of what each costs by itself."""
    module = tmp_path / "scaled.py"
    module.write_text(HARMFUL)
    results = run_ranks(2, _check_joint_harm, str(module))
    values, increases, made_up, line = results[0]
    for point, cost in values["points"].items():
        assert cost == pytest.approx(increases[point], rel=1e-6)
    assert values["joint_increase"] == pytest.approx(increases["both"], rel=1e-6)
    assert values["expected_increase"] == sum(values["points"].values())
    assert made_up["expected_increase"] == made_up["joint_increase"] == pytest.approx(2.0)
    assert made_up["eased"] == "ep-combine-forward"
    assert line is not None
    costs = "ep-dispatch-forward 0.20%, ep-combine-forward 0.30%"
    together = "ep-dispatch-forward and ep-combine-forward together more"
    assert f"the loss is expected to be 2.00% higher ({costs}; {together}), above" in line
    assert results[1] == results[0]


@pytest.mark.parametrize(("joint", "eased"), [(0.9, "tp-forward"), (0.11, "dp-grad"), (math.inf, "tp-forward")])
def test_points_that_cost_more_together_are_eased_rather_than_others(joint: float, eased: str) -> None:
    guard = _guard(tiny_engines(_auto(["dp-grad=fixpoint,bits=8"], budget=0.4)))
    costs = {Point.PP_FWD: 0.05, Point.TP_FWD: 0.06, Point.DP_GRAD: 0.3}
    measurement = LossMeasurement({}, {}, joint, [Point.PP_FWD, Point.TP_FWD])
    assert guard._decide(costs, measurement.total(costs), measurement)["eased"] == eased


def _increase_by_stages(stages: int) -> float:
    layout = {"parallel": {"pipeline_model_parallel_size": stages}}
    guard = _guard(tiny_engines(merge(layout, _auto(["pp-forward=fixpoint,bits=8"]))))
    return guard._points[Point.PP_FWD].candidate.increase


def test_costs_of_pipeline_messages_count_for_each_boundary() -> None:
    (two, *_), (four, *_) = run_ranks(2, _increase_by_stages, 2), run_ranks(4, _increase_by_stages, 4)
    assert four == pytest.approx(3 * two)


def _check_losses_that_are_not_finite(module: str) -> list[Any]:
    engines = tiny_engines(merge(STAGES, _auto(["pp-forward=scaled,factor=1.0"], module)))
    values = []
    for exact_loss, compressed_loss in ((math.nan, 1.0), (1.0, math.nan)):
        guard = _guard(engines)
        losses = {(): exact_loss, (Point.PP_FWD,): compressed_loss}
        guard._evaluate_loss = losses.__getitem__  # type: ignore[assignment, method-assign]
        values.append(dict(guard.check(7).values))
    return [*values, guard.checks]


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    """If the run itself has diverged, no compressor is blamed; if compression makes the loss infinite, it goes."""
    module = tmp_path / "scaled.py"
    module.write_text(HARMFUL)
    for diverged, destroyed, checks in run_ranks(2, _check_losses_that_are_not_finite, str(module)):
        assert diverged["eased"] is None
        assert destroyed["eased"] == "pp-forward"
        assert destroyed["points"]["pp-forward"] == math.inf
        assert checks == [LossCheck(7, MAX_INCREASE, "pp-forward")]


def test_settings_of_another_version_begin_with_the_one_in_use() -> None:
    ladder = [(CandidateSpec("gentle", 0.1), cast(Spec, None)), (CandidateSpec("bold", 0.3), cast(Spec, None))]
    state = {"chosen": "bold", "breaks": [1, 2], "calm_checks": 3}
    known = guard_point(ladder, "gentle", True, Values(state))
    assert ([candidate.spec for candidate, _ in known.settings], known.position) == (["bold", "gentle"], 2)
    assert (known.breaks, known.calm_checks) == ([1, 2], 3)
    assert known.bolder is None
    unknown = guard_point(ladder, "gentle", False, Values({**state, "chosen": "boldest"}))
    assert ([candidate.spec for candidate, _ in unknown.settings], unknown.position) == (["gentle"], 0)
    assert (unknown.breaks, unknown.calm_checks) == ([0], 0)
