"""Learning-rate and weight-decay schedules."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.schedules import ANNEALING_STYLES, DECAY_STYLES, LRSchedule, ScheduleValues


def make_values(**changes: Any) -> ScheduleValues:
    values: dict[str, Any] = {
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "warmup_samples": 0.0,
        "decay_samples": 100.0,
        "decay_style": "cosine",
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.1,
        "weight_decay_samples": 100.0,
        "weight_decay_style": "constant",
    }
    return ScheduleValues(**(values | changes))


def make_options(**changes: Any) -> OptimizerConfig:
    options: dict[str, Any] = {"lr": 1e-3, "start_weight_decay": 0.01, "end_weight_decay": 0.01}
    return OptimizerConfig(**(options | changes))


def torch_rates(scheduler_type: Any, steps: int, **arguments: Any) -> list[float]:
    """Learning rates after 0, 1, 2... steps of a scheduler of torch, with a maximum of 1e-3."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = scheduler_type(optimizer, **arguments)
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_cosine_and_linear_decay_match_torch() -> None:
    cosine = torch_rates(torch.optim.lr_scheduler.CosineAnnealingLR, 100, T_max=100, eta_min=1e-4)
    linear = torch_rates(torch.optim.lr_scheduler.LinearLR, 100, start_factor=1.0, end_factor=0.1, total_iters=100)
    for style, rates in (("cosine", cosine), ("linear", linear)):
        values = make_values(decay_style=style)
        assert [values.lr_at(n) for n in range(101)] == pytest.approx(rates, rel=1e-9)


def test_inverse_square_root_falls_from_the_end_of_the_warm_up() -> None:
    values = make_values(decay_style="inverse-square-root", warmup_samples=4.0, min_lr=2.5e-4)
    assert [values.lr_at(n) for n in (4, 16, 36, 99)] == pytest.approx([1e-3, 5e-4, 1e-3 / 3, 2.5e-4])


def test_warm_up_rises_linearly_from_its_initial_rate() -> None:
    values = make_values(warmup_samples=20.0, warmup_init=2e-4)
    assert [values.lr_at(n) for n in (0, 5, 20)] == pytest.approx([2e-4, 4e-4, 1e-3])
    values = make_values(warmup_samples=20.0, decay_style="linear", min_lr=0.0)
    assert [values.lr_at(n) for n in (0, 5, 20, 60, 100, 101)] == pytest.approx([0, 2.5e-4, 1e-3, 5e-4, 0, 0])


@pytest.mark.parametrize(
    ("style", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)]
)
def test_wsd_is_constant_until_its_decay(style: str, halfway: float) -> None:
    values = make_values(decay_style="WSD", warmup_samples=10.0, annealing_style=style, annealing_samples=40.0)
    rates = [values.lr_at(n) for n in (5, 10, 35, 60, 80, 100, 101)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 1e-4 + 9e-4 * halfway, 1e-4, 1e-4])


def test_a_checkpoint_without_later_fields_loads() -> None:
    state = LRSchedule(make_values(warmup_samples=10.0)).state_dict()
    for name in ("warmup_init", "annealing_style", "annealing_samples", "decoupled_lr", "decoupled_min_lr"):
        del state[name]
    resumed = LRSchedule(make_values(warmup_samples=10.0), "checkpoint")
    resumed.load_state_dict(state)
    assert resumed.values == make_values(warmup_samples=10.0)


def test_the_published_log_line() -> None:
    """960 samples of a warm-up of 216,320 to 1e-4."""
    values = make_values(max_lr=1e-4, min_lr=1e-5, warmup_samples=216_320.0, decay_samples=126_953_125.0)
    assert f"{values.lr_at(960):.3E}" == "4.438E-07"


@given(
    style=st.sampled_from(DECAY_STYLES),
    annealing=st.sampled_from(ANNEALING_STYLES),
    warmup=st.integers(0, 99),
    samples=st.integers(0, 250),
    min_lr=st.floats(0, 1e-3),
)
def test_the_rate_stays_in_its_range_and_never_rises_after_the_warm_up(
    style: str, annealing: str, warmup: int, samples: int, min_lr: float
) -> None:
    wsd = {"annealing_style": annealing, "annealing_samples": (100.0 - warmup) / 2}
    values = make_values(decay_style=style, warmup_samples=float(warmup), min_lr=min_lr, **wsd)
    rate = values.lr_at(samples)
    assert 0 <= rate <= 1e-3 * (1 + 1e-12)
    if samples >= warmup:
        assert rate >= min_lr * (1 - 1e-12)
        assert values.lr_at(samples + 1) <= rate * (1 + 1e-12)


def test_weight_decay_grows() -> None:
    for style, quarter in (("linear", 0.25), ("cosine", 0.14644660940672624)):
        values = make_values(start_weight_decay=0.0, end_weight_decay=1.0, weight_decay_style=style)
        decays = [values.weight_decay_at(n) for n in (0, 25, 50, 100, 300)]
        assert decays == pytest.approx([0, quarter, 0.5, 1, 1])


def test_iterations_are_multiplied_by_the_global_batch_size() -> None:
    options = make_options(lr_warmup_iters=5, lr_decay_iters=40)
    values = LRSchedule.from_options(options, global_batch_size=8, seq_length=16, train_iters=50).values
    assert (values.warmup_samples, values.decay_samples, values.weight_decay_samples) == (40, 320, 400)


def test_the_decay_takes_the_length_of_the_run_by_default() -> None:
    by_iters = LRSchedule.from_options(make_options(), global_batch_size=8, seq_length=16, train_iters=50).values
    by_samples = LRSchedule.from_options(make_options(), global_batch_size=8, seq_length=16, train_samples=400).values
    by_tokens = LRSchedule.from_options(make_options(), global_batch_size=8, seq_length=16, train_tokens=6415).values
    assert by_iters == by_samples
    assert by_tokens.decay_samples == 400
    with pytest.raises(UserError, match="--train-iters or --train-samples"):
        LRSchedule.from_options(make_options(), global_batch_size=8, seq_length=16)


def test_fraction_and_tokens_of_the_warm_up() -> None:
    options = make_options(lr_warmup_fraction=0.25, lr_decay_samples=200)
    values = LRSchedule.from_options(options, global_batch_size=8, seq_length=16, train_samples=400).values
    assert values.warmup_samples == 50
    options = make_options(lr_warmup_tokens=330, lr_decay_tokens=1604)
    values = LRSchedule.from_options(options, global_batch_size=8, seq_length=16, train_samples=400).values
    assert (values.warmup_samples, values.decay_samples) == (20.625, 100.25)


def test_lengths_in_tokens_are_exact() -> None:
    """The rates of Megatron-DeepSpeed, a function of tokens, with lengths that are no multiples of sequences."""
    warmup, decay, peak = 330, 1604, 1e-3
    options = make_options(lr_warmup_tokens=warmup, lr_decay_tokens=decay, lr_decay_style="linear")
    schedule = LRSchedule.from_options(options, global_batch_size=4, seq_length=16, train_samples=400)
    for step in range(30):
        tokens = step * 4 * 16
        falling = peak * (1 - (tokens - warmup) / (decay - warmup)) if tokens <= decay else 0.0
        assert schedule.lr == pytest.approx(peak * tokens / warmup if tokens <= warmup else falling, rel=1e-12)
        schedule.step(4, 64)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"min_lr": 2e-3}, "--min-lr"),
        ({"warmup_samples": 100.0}, "--lr-warmup-"),
        ({"decay_samples": 0.0}, "--lr-decay-"),
        ({"decay_style": "exponential"}, "--lr-decay-style"),
        ({"start_weight_decay": 0.2}, "--start-weight-decay"),
        ({"start_weight_decay": 0.0}, "--weight-decay-incr-style"),
        ({"weight_decay_style": "square"}, "--weight-decay-incr-style"),
        ({"warmup_init": 2e-3}, "--lr-warmup-init"),
        ({"annealing_style": "square"}, "--lr-wsd-decay-style"),
        ({"decay_style": "WSD"}, "--lr-wsd-decay-"),
        ({"decoupled_lr": 1e-5}, "--min-lr 0.0001 must lie between 0 and --decoupled-lr"),
        ({"decoupled_lr": 1e-2, "decoupled_min_lr": 2e-2}, "--decoupled-min-lr"),
        ({"decoupled_min_lr": 1e-5}, "--decoupled-min-lr 1e-05 needs --decoupled-lr"),
        ({"decoupled_lr": 1e-2, "warmup_init": 5e-3}, "--lr-warmup-init"),
        ({"decay_style": "WSD", "annealing_samples": 90.0, "warmup_samples": 20.0}, "--lr-wsd-decay-"),
    ],
)
def test_invalid_values_name_their_flag(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag) as error:
        make_values(**changes)
    assert "\n" not in str(error.value)


def test_a_state_restores_the_position() -> None:
    schedule = LRSchedule(make_values(warmup_samples=10.0))
    for _ in range(7):
        schedule.step(8)
    state = json.loads(json.dumps(schedule.state_dict()))
    other = LRSchedule(make_values(warmup_samples=10.0))
    other.load_state_dict(state)
    assert other.consumed_samples == 56
    assert (other.lr, other.weight_decay) == (schedule.lr, schedule.weight_decay)


def test_a_decay_in_tokens_counts_the_tokens_of_short_sequences() -> None:
    """A checkpoint of an earlier version did not count tokens: all its sequences were full."""
    options = make_options(lr_decay_tokens=1600, lr_decay_style="linear")
    original, restored, earlier = (
        LRSchedule.from_options(options, global_batch_size=4, seq_length=16, train_samples=1000) for _ in range(3)
    )
    for length in (4, 4, 8, 16):
        original.step(10, 10 * length)
    assert original.consumed_samples == 40
    assert original.lr == original.values.lr_at(20.0) < original.values.max_lr
    state = json.loads(json.dumps(original.state_dict()))
    restored.load_state_dict(state)
    assert restored.lr == original.lr
    restored.step(5)
    assert restored.lr == restored.values.lr_at(25.0)
    del state["consumed_tokens"]
    earlier.load_state_dict(state)
    assert earlier.lr == earlier.values.lr_at(40.0)


def test_a_decay_in_samples_ignores_tokens() -> None:
    schedule = LRSchedule.from_options(make_options(), global_batch_size=4, seq_length=16, train_samples=100)
    schedule.step(10, 20)
    assert schedule.lr == schedule.values.lr_at(10.0)
    assert "consumed_tokens" not in schedule.state_dict()


def test_a_changed_value_needs_a_flag() -> None:
    saved = LRSchedule(make_values())
    saved.step(50)
    changed = make_values(max_lr=5e-3)

    with pytest.raises(UserError, match=r"^--lr: .*--override-opt_param-scheduler"):
        LRSchedule(changed).load_state_dict(saved.state_dict())

    override = LRSchedule(changed, "command-line")
    override.load_state_dict(saved.state_dict())
    assert (override.consumed_samples, override.lr) == (50, changed.lr_at(50))

    keep = LRSchedule(changed, "checkpoint")
    keep.load_state_dict(saved.state_dict())
    assert (keep.consumed_samples, keep.lr) == (50, saved.lr)


def test_every_field_is_compared() -> None:
    growing = {"start_weight_decay": 0.05, "weight_decay_style": "linear", "warmup_samples": 10.0}
    growing |= {"decay_style": "WSD", "annealing_samples": 20.0, "warmup_init": 1e-5}
    growing |= {"decoupled_lr": 1e-2, "decoupled_min_lr": 1e-3}
    saved = LRSchedule(make_values(**growing)).state_dict()
    different: dict[str, Any] = {
        "decay_style": "linear",
        "weight_decay_style": "cosine",
        "start_weight_decay": 0.06,
        "end_weight_decay": 0.2,
        "annealing_style": "linear",
    }
    for field in dataclasses.fields(ScheduleValues):
        value = different.get(field.name) or getattr(make_values(**growing), field.name) / 2
        with pytest.raises(UserError, match=field.name):
            LRSchedule(make_values(**(growing | {field.name: value}))).load_state_dict(saved)


def test_a_constant_schedule_may_be_prolonged() -> None:
    saved = LRSchedule(make_values(decay_style="constant"))
    longer = {"decay_samples": 900.0, "weight_decay_samples": 900.0, "min_lr": 0.0}
    LRSchedule(make_values(decay_style="constant", **longer)).load_state_dict(saved.state_dict())
    lower_than_their_lowest = make_values(decay_style="constant", max_lr=5e-6, min_lr=0.0)
    LRSchedule(lower_than_their_lowest, "refuse", ["max_lr"]).load_state_dict(saved.state_dict())
    shorter_decay = LRSchedule(make_values(decay_samples=50.0))
    with pytest.raises(UserError, match="decay_samples is 50"):
        shorter_decay.load_state_dict(LRSchedule(make_values()).state_dict())


def test_flags_for_new_rates_replace_those_of_the_checkpoint() -> None:
    saved = LRSchedule(make_values(max_lr=1e-3, min_lr=1e-5))
    ours = make_values(max_lr=4e-3, min_lr=2e-5)
    resumed = LRSchedule(ours, "checkpoint", ["max_lr"])
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.values.max_lr, resumed.values.min_lr) == (4e-3, 1e-5)
    resumed = LRSchedule(ours, "refuse", ["max_lr", "min_lr"])
    resumed.load_state_dict(saved.state_dict())
    assert resumed.values == ours
    below_theirs = make_values(max_lr=5e-6, min_lr=0.0)
    resumed = LRSchedule(below_theirs, "command-line", ["max_lr"])
    resumed.load_state_dict(saved.state_dict())
    assert resumed.values == below_theirs
    for flag, names in (
        ("use_new_lr", ("max_lr", "decoupled_lr")),
        ("use_new_min_lr", ("min_lr", "decoupled_min_lr")),
    ):
        options = make_options(**{flag: True})
        assert LRSchedule.from_options(options, global_batch_size=8, seq_length=16, train_iters=10).overrides == names


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_a_decoupled_rate_matches_a_schedule_with_its_bounds(style: str) -> None:
    """Its lowest rate is the common rate by default."""
    common: dict[str, Any] = {"decay_style": style, "warmup_samples": 10.0, "annealing_samples": 30.0}
    for lowest, bounds in (({"decoupled_min_lr": 1e-5}, {"min_lr": 1e-5}), ({}, {})):
        values = make_values(**common, decoupled_lr=5e-3, **lowest)
        separate = make_values(**common, max_lr=5e-3, **bounds)
        assert [values.decoupled_lr_at(n) for n in range(120)] == [separate.lr_at(n) for n in range(120)]
        assert [values.lr_at(n) for n in range(120)] == [make_values(**common).lr_at(n) for n in range(120)]


def test_a_decoupled_rate_or_its_absence_is_saved() -> None:
    for decoupled in (None, 5e-3):
        schedule = LRSchedule(make_values(decoupled_lr=decoupled))
        schedule.step(50)
        state = json.loads(json.dumps(schedule.state_dict()))
        restored = LRSchedule(make_values(), "checkpoint")
        restored.load_state_dict(state)
        assert restored.rates == schedule.rates
        assert (restored.rates.decoupled_lr is None) == (decoupled is None)
        other = None if decoupled else 5e-3
        with pytest.raises(UserError, match=f"^--decoupled-lr: decoupled_lr is {other} on the command line"):
            LRSchedule(make_values(decoupled_lr=other)).load_state_dict(state)


def test_contradicting_flags_and_damaged_states_are_refused() -> None:
    options = make_options(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)
    with pytest.raises(UserError, match="give one"):
        LRSchedule.from_options(options, global_batch_size=8, seq_length=16, train_iters=10)
    options = make_options(use_checkpoint_opt_param_scheduler=True)
    schedule = LRSchedule.from_options(options, global_batch_size=8, seq_length=16, train_iters=10)
    assert schedule.on_mismatch == "checkpoint"
    for damage in ({}, schedule.state_dict() | {"max_lr": "much"}, schedule.state_dict() | {"min_lr": 9.0}):
        with pytest.raises(UserError, match="cannot be read"):
            schedule.load_state_dict(damage)
