"""Options and schedule of the point ``outer``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.base.option import field_options
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback
from megatron.compression.fixpoint import FixpointRounds, FixpointSumConfig
from megatron.compression.lockstep import run_lockstep
from megatron.compression.outer import PRESETS, OuterOptions, RoundSchedule
from megatron.compression.plugins import build_registry
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, read_spec
from megatron.compression.state import CompressorState

BUILTIN = build_registry([])


def _spec(text: str, iterations: int | None = 90, registry: Registry = BUILTIN) -> Spec:
    return read_spec(text, registry, RunLength(iterations))


def test_a_spec_mixes_options_of_the_point_and_of_the_compressor() -> None:
    spec = _spec("outer=fixpoint,bits=4,every=20,outer-lr=0.5,outer-momentum=0.8,warmup=0.1,group=32")
    assert spec.outer_options == OuterOptions(every=20, outer_lr=0.5, outer_momentum=0.8)
    assert (spec.options.bits, spec.options.group, spec.activation.warmup_iters) == (4, 32, 9)


def test_the_warm_up_is_a_third_of_the_run_by_default() -> None:
    assert _spec("outer=identity").activation.warmup_iters == 30
    assert _spec("outer=identity,warmup=0").activation.warmup_iters == 0
    assert _spec("dp-grad=fixpoint").activation.warmup_iters == 0
    with pytest.raises(UserError, match="a third of the run, which needs --train-iters"):
        _spec("outer=identity", None)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_options_and_can_be_overridden(preset: str) -> None:
    written = ",".join(f"{key}={value}" for key, value in PRESETS[preset].items())
    short, long = _spec(f"outer=fixpoint,outer-preset={preset}"), _spec(f"outer=fixpoint,{written}")
    assert (short.outer_options, short.feedback, short.decay) == (long.outer_options, long.feedback, long.decay)
    assert short.preset == preset
    assert (short.decay < 1) == ("feedback-decay" in PRESETS[preset])
    assert _spec(f"outer=fixpoint,outer-lr=0.25,outer-preset={preset}").outer_options.outer_lr == 0.25
    assert _spec(f"outer=identity,outer-preset={preset}").feedback == "off"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("fixpoint,delay=10,every=10", "at most 9"),
        ("fixpoint,delay=5,every=10,fragments=2", "after 5 steps"),
        ("fixpoint,every=10,fragments=3", "write a multiple"),
        ("fixpoint,every=2,fragments=3", "a step of its own"),
        ("fixpoint,outer-optimizer=plain,outer-momentum=0.9", "outer-optimizer=plain has none"),
        ("fixpoint,feedback-decay=0.5", "there is no residual"),
        ("fixpoint,outer-momentum=1", "below 1"),
        ("fixpoint,outer-preset=dilco", "the nearest is diloco"),
        ("fixpoint,outer-preset=noloco-like", "never have an anchor in common"),
        ("fixpoint,evry=3", "the nearest is every"),
        ("edgc", "is tuned by gradients"),
        ("stable-topk,density=0.1", "needs the optimizer's update"),
        ("quantized-adam,warmup=2", "is part of the inner optimizer"),
        ("delta", "cannot serve outer"),
    ],
)
def test_invalid_specs_are_refused_in_one_line(words: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        _spec(f"outer={words}")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_points_refuse_options_of_outer() -> None:
    with pytest.raises(UserError, match="no option 'every'"):
        _spec("dp-grad=fixpoint,every=3")


def test_no_compressor_has_an_option_with_a_name_of_the_points_options() -> None:
    point_flags = {option.flag for option in field_options("outer", OuterOptions)}
    for name in BUILTIN.names:
        assert point_flags.isdisjoint(option.flag for option in field_options(name, BUILTIN[name].config))


def test_the_residual_of_any_sum_may_decay() -> None:
    for text, decay in (
        ("dp-grad=topk,density=0.1,feedback-decay=0.5", 0.5),
        ("outer=chunked-topk,feedback-decay=0.5", 0.5),
        ("outer=chunked-topk", 1.0),
    ):
        rounds = _spec(text).make_rounds()
        assert isinstance(rounds, ErrorFeedback)
        assert rounds.decay == decay
    with pytest.raises(UserError, match=r"residuals of messages \(pp-backward\) do not decay"):
        _spec("pp-backward=lowrank,error-feedback=lazy,feedback-decay=0.5")


def test_fragments_take_turns_and_the_last_iteration_sends_all() -> None:
    schedule = RoundSchedule(OuterOptions(every=6, fragments=3, delay=1), start=4, end=15)
    sent = {done: schedule.due_fragments(done) for done in range(16) if schedule.due_fragments(done)}
    assert sent == {6: [0], 8: [1], 10: [2], 12: [0], 14: [1], 15: [0, 1, 2]}
    assert [schedule.applied_at(done) for done in (6, 14, 15)] == [7, 15, 15]
    assert not schedule.is_local(3)
    assert schedule.is_local(4)


@pytest.mark.parametrize("away", [{"fragments": 2}, {"delay": 1}, {"mixing": 0.5}], ids=str)
def test_islands_meet_after_a_round_unless_an_option_keeps_them_apart(away: dict[str, Any]) -> None:
    assert OuterOptions(every=4).ends_in_sync
    assert not OuterOptions(every=4, **away).ends_in_sync


def test_whole_rounds() -> None:
    schedule = RoundSchedule(OuterOptions(every=5), start=0, end=12)
    assert [done for done in range(13) if schedule.due_fragments(done)] == [5, 10, 12]
    assert schedule.rounds == 3


def test_a_residual_decays_by_its_factor_each_round() -> None:
    """In each round, total + new residuals = inputs + decayed old residuals."""
    torch.manual_seed(0)
    compressor = ErrorFeedback(FixpointRounds(FixpointSumConfig(bits=2)), "local", 0.5)
    states = [CompressorState() for _ in range(2)]
    before = [torch.zeros(64) for _ in states]
    for _ in range(3):
        inputs = [torch.randn(64) for _ in states]
        total = run_lockstep(compressor, [x.clone() for x in inputs], states)[0].total
        residuals = [state.tensors[RESIDUAL] for state in states]
        expected = sum(x + 0.5 * e for x, e in zip(inputs, before, strict=True))
        torch.testing.assert_close(total.view(-1) + sum(e.view(-1) for e in residuals), expected, rtol=1e-5, atol=1e-5)
        before = [e.view(-1).clone() for e in residuals]
        assert any(bool(e.abs().max() > 0.01) for e in before)
