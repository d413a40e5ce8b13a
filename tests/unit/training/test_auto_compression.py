"""``--compress auto`` on a rank: the kept choice of a checkpoint, and the check of the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.base.errors import UserError
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.run import RunConfig
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.topology import single_process
from megatron.planner.auto import AutoChoice, AutoSearch, LossEstimate, MeasuredTraffic, SettingChoice
from megatron.planner.auto_report import report
from megatron.planner.candidates import CandidateSpec
from megatron.planner.choice import Choice
from megatron.planner.predict import Predictor
from megatron.planner.settings import FREE_SETTINGS
from megatron.training import auto_compression
from megatron.training.auto_compression import check_auto, choose_compressors
from megatron.training.saved_choice import (
    CHOICE,
    SavedChecks,
    describe_choice,
    keep_choice,
    restore_choice,
    specs_in_use,
)
from megatron.training.saved_run import SavedRun
from megatron.training.trial_steps import SetTime
from tests.support.tiny import tiny_checkpoints, tiny_config, tiny_engines
from tests.unit.planner.test_auto import FakePredictor

AUTO: dict[str, dict[str, Any]] = {"compression": {"compress": ["auto", "pp-forward=cast"]}}
KEPT = {
    "specs": ["pp-forward=fixpoint,bits=8", "dp-grad=fixpoint,bits=4"],
    "layout": [1, 1, 1, 1],
    "max_loss_increase": 0.5,
}


def _no_trial(*_: Any) -> list[SetTime]:
    raise AssertionError("one process has no traffic to compress")


def _choose(
    config: RunConfig, choice: Any, trains: bool = True, explicit: Sequence[str] = ()
) -> tuple[RunConfig, AutoChoice | None, list[str]]:
    saved = cast(SavedRun, SimpleNamespace(common={CHOICE: choice}))
    lines: list[str] = []
    kept = keep_choice(config, single_process(), saved, explicit, lines.append)
    if kept is not None:
        return kept[0], None, lines
    timer = _no_trial if trains else None
    env = LaunchEnvironment(0, 1, 0, 1)
    return *choose_compressors(config, single_process(), env, 100, 1000, explicit, timer, lines.append), lines


def test_the_choice_of_a_checkpoint_is_kept_beside_the_users_specs() -> None:
    config, choice, lines = _choose(tiny_config(AUTO, 1), KEPT)
    assert config.compression.compress == ["pp-forward=cast", "auto", "dp-grad=fixpoint,bits=4"]
    assert config.compression.chosen_specs == ["dp-grad=fixpoint,bits=4"]
    assert config.compression.without_choice().compress == ["pp-forward=cast", "auto"]
    assert choice is None
    assert lines == ["--compress auto: keeps the choice of the checkpoint's run: dp-grad=fixpoint,bits=4"]


def test_the_settings_of_a_choice_are_kept_unless_the_user_gives_them() -> None:
    choice: dict[str, Any] = {**KEPT, "settings": ["overlap_grad_reduce", "pipeline_schedule"]}
    config, _, lines = _choose(tiny_config(AUTO, 1), choice)
    assert (config.parallel.overlap_grad_reduce, config.parallel.pipeline_schedule) == (True, "auto")
    assert lines[0].endswith("dp-grad=fixpoint,bits=4 --overlap-grad-reduce --pipeline-schedule auto")
    config, _, lines = _choose(tiny_config(AUTO, 1), choice, explicit=["parallel.pipeline_schedule"])
    assert (config.parallel.overlap_grad_reduce, config.parallel.pipeline_schedule) == (True, "1f1b")
    assert lines[0].endswith("dp-grad=fixpoint,bits=4 --overlap-grad-reduce")
    described = describe_choice(config, single_process().layout, CompressionPlan({}), settings=FREE_SETTINGS)
    assert described["settings"] == [*choice["settings"], "moe_two_stage"]
    gpipe = {**AUTO, "parallel": {"pipeline_schedule": "gpipe"}}
    assert _choose(tiny_config(gpipe, 1), choice)[0].parallel.pipeline_schedule == "gpipe"
    with pytest.raises(UserError, match="settings: unknown lr"):
        _choose(tiny_config(AUTO, 1), {**KEPT, "settings": ["lr"]})


def test_the_saved_configuration_has_no_chosen_settings() -> None:
    """Otherwise, a run that reads it would take them for those of the user."""
    engines = tiny_engines({"parallel": {"overlap_grad_reduce": True}})
    assert "overlap_grad_reduce: true" in tiny_checkpoints(engines).config_yaml
    assert "overlap_grad_reduce: false" in tiny_checkpoints(engines, settings={"overlap_grad_reduce": True}).config_yaml


def test_compressors_that_were_turned_off_stay_off_where_the_choice_is_kept() -> None:
    """Not those of the user."""
    choice = {**KEPT, "turned_off": ["dp-grad", "pp-forward"]}
    config, _, lines = _choose(tiny_config(AUTO, 1), choice)
    assert lines[0].endswith("checkpoint's run: dp-grad=fixpoint,bits=4; turned off since: dp-grad")
    plan = CompressionPlan(config.compression.specs(RunLength(10)))
    checks = restore_choice(cast(SavedRun, SimpleNamespace(common={CHOICE: choice})), config, plan)
    assert checks == SavedChecks()  # of a checkpoint before there were any
    assert [point for point in plan.specs if plan.is_turned_off(point)] == [Point.DP_GRAD]
    assert specs_in_use(choice) == []


@pytest.mark.parametrize("layout", [[2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2]])
def test_a_checkpoint_of_another_layout_or_without_a_choice_is_not_kept(layout: list[int]) -> None:
    config, _, lines = _choose(tiny_config(AUTO, 1), {**KEPT, "layout": layout})
    assert config.compression.compress == ["pp-forward=cast", "auto"]
    expected = "chooses again, since the layout has changed; the checkpoint's run had dp-grad=fixpoint,bits=4"
    assert lines[0] == f"--compress auto: {expected}"
    assert _choose(tiny_config(AUTO, 1), {})[2] == [auto_compression.NOTHING_TO_CHOOSE]


def test_a_lower_budget_and_specs_that_no_longer_fit_choose_again() -> None:
    _, _, lines = _choose(tiny_config(AUTO, 1), {**KEPT, "max_loss_increase": 0.6})
    assert "chooses again, since --max-loss-increase is below 0.6; " in lines[0]
    fused = {**KEPT, "specs": ["embedding=none,fused=on"]}
    sharded = {**AUTO, "parallel": {"use_distributed_optimizer": True}}
    _, _, lines = _choose(tiny_config(sharded, 1), fused)
    assert "chooses again, since its choice no longer fits (--compress embedding=none: with --use-d" in lines[0]


def test_a_checkpoint_has_the_chosen_specs_alone() -> None:
    layout = single_process().layout
    plan = CompressionPlan({})
    assert describe_choice(tiny_config({"compression": {"compress": ["dp-grad=cast"]}}, 1), layout, plan) == {}
    chosen = tiny_config({"compression": {"compress": ["pp-forward=cast", "auto", "dp-grad=cast"]}}, 1)
    assert describe_choice(chosen, layout, plan) == {
        "specs": ["dp-grad=cast"],
        "turned_off": [],
        "settings": [],
        "layout": [1, 1, 1, 1],
        "max_loss_increase": 0.5,
        "adapts": False,
        "loss_checks": {},
        "loss_check_interval": None,
        "s_per_token": None,
        "step_tokens": None,
    }


def test_adapting_chooses_again_unless_the_run_adapted_before() -> None:
    """Such a run has chosen by its links, and is exact when it resumes."""
    adapting = {"compression": {**AUTO["compression"], "compress_adapt": True}}
    assert "chooses again, since --compress-adapt is given; " in _choose(tiny_config(adapting, 1), KEPT)[2][0]
    assert "keeps the choice" in _choose(tiny_config(adapting, 1), {**KEPT, "adapts": True})[2][0]
    assert "keeps the choice" in _choose(tiny_config(AUTO, 1), {**KEPT, "adapts": True})[2][0]


@pytest.mark.parametrize("checkpoint", [{}, {"save": "somewhere", "no_save_optim": True}])
def test_a_run_that_adapts_saves_itself(checkpoint: dict[str, Any]) -> None:
    compression = {"compression": {"compress": ["auto"], "compress_adapt": True}}
    with pytest.raises(UserError, match="--compress-adapt: the run saves itself before it chooses again; give --save"):
        check_auto(tiny_config({**compression, "checkpoint": checkpoint}, 1), 1)
    check_auto(tiny_config({**compression, "checkpoint": {"save": "somewhere"}}, 1), 1)


def test_the_results_of_checks_are_kept() -> None:
    config = _choose(tiny_config(AUTO, 1), KEPT)[0]
    entry = {"chosen": "dp-grad=fixpoint,bits=4", "breaks": [1], "calm_checks": 3}
    step_tokens = 15360 * 4096  # of DeepSeek-V3
    steps = {"s_per_token": 0.25, "step_tokens": step_tokens, "loss_check_interval": 300}
    saved = SimpleNamespace(common={CHOICE: {**KEPT, "loss_checks": {"dp-grad": entry}, **steps}})
    checks = restore_choice(cast(SavedRun, saved), config, CompressionPlan({}))
    assert (checks.s_per_token, checks.step_tokens) == (0.25, step_tokens)
    assert checks.interval == 300
    assert {name: dict(values) for name, values in checks.loss.items()} == {"dp-grad": entry}


def test_a_run_without_steps_keeps_the_choice_or_chooses_nothing() -> None:
    assert _choose(tiny_config(AUTO, 1), KEPT, trains=False)[0].compression.chosen_specs == ["dp-grad=fixpoint,bits=4"]
    config, _, lines = _choose(tiny_config(AUTO, 1), {}, trains=False)
    assert config.compression.chosen_specs == []
    assert lines == ["--compress auto: chooses nothing, since no step is left to train"]


def test_finetuning_chooses_again() -> None:
    finetune = {**AUTO, "checkpoint": {"load": "somewhere", "finetune": True}}
    assert _choose(tiny_config(finetune, 1), KEPT)[2] == [auto_compression.NOTHING_TO_CHOOSE]


def test_without_auto_nothing_is_chosen_or_read() -> None:
    config = tiny_config({"compression": {"compress": ["pp-forward=cast"]}}, 1)
    assert _choose(config, "damaged") == (config, None, [])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("text", "expected names and values"),
        ({"specs": ["dp-grad=cast"]}, "layout is missing"),
        ({**KEPT, "specs": "dp-grad=cast"}, "specs: expected a list"),
        ({**KEPT, "turned_off": ["nowhere"]}, "turned_off: 'nowhere' is not a valid Point"),
        ({**KEPT, "specs": [7]}, "specs: 7 is not text"),
        ({**KEPT, "specs": ["dp-grad=nothing-known"]}, "no compressor is named 'nothing-known'"),
    ],
)
def test_a_damaged_choice_is_refused_in_one_line(choice: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"the choice of --compress auto.*load another checkpoint") as caught:
        _choose(tiny_config(AUTO, 1), choice)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_that_are_not_planned_are_refused() -> None:
    config = tiny_config(AUTO, 1)
    check_auto(config, 1)
    object.__setattr__(config.model, "model_type", "t5")
    with pytest.raises(UserError, match="the planner does not know t5 models; name the specs"):
        check_auto(config, 1)


@pytest.mark.parametrize(
    ("specs", "increase", "chosen"),
    [
        (["dp-grad=bold"], 0.4, ["dp-grad=bold"]),
        (["dp-grad=mild"], 0.1, ["dp-grad=mild"]),
        (["dp-grad=mildest"], 0.1, []),  # gains too little
        ([], 0.0, []),
    ],
)
def test_the_timed_set_is_replaced_by_the_settings_that_fit_as_measured(
    monkeypatch: pytest.MonkeyPatch, specs: list[str], increase: float, chosen: list[str]
) -> None:
    """Their time is that of the trial steps, in proportion to the predictions."""
    saved_s = {"dp-grad=mildest": 0.32, "dp-grad=mild": 0.4, "dp-grad=bold": 0.6}
    fake = FakePredictor(saved_s, dict.fromkeys(saved_s, 0.0))
    ladder = [CandidateSpec(spec, 0.1 * number) for number, spec in enumerate(saved_s)]
    search = AutoSearch(cast(Predictor, fake), Choice(1, 1, 1), {Point.DP_GRAD: ladder}, 0.5, 2.0, {})
    monkeypatch.setattr(auto_compression, "with_choice", lambda config, specs, settings, topology: specs)
    traffic = {Point.DP_GRAD: MeasuredTraffic(1.0, 1.0)}

    def time_sets(configs: Any, _p: Any, _s: Any, _a: Any, _t: Any, choose_set: Any) -> list[SetTime]:
        assert configs == [[], ["dp-grad=bold"]]
        set_times = [SetTime(1.0, False, traffic), SetTime(0.6, True)]
        assert choose_set(set_times) == 1
        estimate = LossEstimate(specs, increase, 0.05, 1.0)
        return [set_times[0], SetTime(0.6, True, estimate=estimate)]

    config = tiny_config(AUTO, 1)
    choice = auto_compression._try_sets(config, single_process(), search, search.contenders(1), time_sets, 0.0)
    assert choice.chosen.specs == chosen
    assert choice.traffic == traffic
    text = report(choice, 0.5)
    if specs == ["dp-grad=bold"]:
        assert (choice.increase, choice.bolder) == (0.4, None)
        assert "loss with all points together, as measured after the trial steps: +0.05%" in text
        assert "as measured on a small GPT and after the trial steps" in text
    else:
        assert choice.bolder is not None
        assert choice.bolder.specs == ["dp-grad=bold"]
        result = " ".join(chosen) or "nothing"
        assert f"dp-grad=bold costs too much loss, as measured after the trial steps: the choice is {result}" in text
        assert choice.chosen.seconds == pytest.approx(0.6 * 0.6 / 0.4 if chosen else 1.0)
        assert ("predicted 0.9 s an iteration, 1 s without" in text) == bool(chosen)
    if not chosen:
        assert "nothing: bold would save" in text
        assert "but costs too much loss, as measured" in text
        assert choice.bolder is not None
        bolder = replace(choice.bolder, settings={"overlap_grad_reduce": True})
        for timed, reason in ((choice.bolder, "beside the compressors"), (bolder, "with gentler compressors")):
            eased = replace(choice, bolder=timed)
            vars(eased)["settings"] = [SettingChoice("--overlap-grad-reduce", 0.1, is_on=False)]
            assert f"--overlap-grad-reduce was to save 0.1 s, but {reason} too little" in report(eased, 0.5)
