"""Options that change over the run."""

from __future__ import annotations

import pytest
import torch

from megatron.base.errors import UserError
from megatron.compression.builtin import BUILTIN
from megatron.compression.lockstep import run_lockstep
from megatron.compression.points import Point
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength, read_schedule
from megatron.compression.spec import Spec, read_spec
from megatron.compression.state import CompressorState
from megatron.distributed.policy import CompressionPlan

LENGTH = RunLength(1000, lambda epochs: round(100 * epochs))


def _spec(text: str) -> Spec:
    return read_spec(text, Registry(BUILTIN), LENGTH)


def test_steps_begin_at_iterations_fractions_and_epochs() -> None:
    schedule = read_schedule("64@0/32@10/16@2epochs/8@0.5", LENGTH)
    assert [schedule.at(i) for i in (0, 9, 10, 199, 200, 499, 500, 10**6)] == [64, 64, 32, 32, 16, 16, 8, 8]


def test_a_ramp_is_that_of_deep_gradient_compression() -> None:
    """density ^ ((s + 1) / (W + 1)) from the end of the warm-up on, then the density itself."""
    schedule = read_schedule("1~0.1@4", LENGTH)
    values = [schedule.at(i, warmup=3) for i in range(12)]
    assert values[3:8] == pytest.approx([0.1 ** ((s + 1) / 5) for s in range(5)])
    assert values[7:] == [0.1] * 5


def test_the_plan_follows_the_schedule() -> None:
    plan = CompressionPlan({Point.PP_FWD: _spec("pp-forward=fixpoint,bits=8@0/4@7,warmup=2")})
    bits = []
    for iteration in (0, 6, 7, -1, 8):
        plan.begin_step(iteration)
        bits.append(plan.codec(Point.PP_FWD).config.bits)
    assert bits == [8, 8, 4, 4, 4]
    first = plan.codec(Point.PP_FWD)
    plan.begin_step(9)
    assert plan.codec(Point.PP_FWD) is first


def test_bits_change_in_fractional_steps_or_ramp_through_integers() -> None:
    for text, expected in (
        ("bits=8@0/4.5@7/3@9", [8, 8, 4.5, 4.5, 3]),
        ("bits=8~4@4", [7, 6, 5, 5, 4, 4]),
    ):
        spec = _spec(f"pp-forward=fixpoint,{text}")
        start = 5 if "@7" in text else 0
        assert [spec.options_at(start + i).bits for i in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp-forward=fixpoint,bits=8~4.5@9", ["bits=8~4.5@9", "write integers", "or steps instead of a ramp"]),
        ("pp-forward=fixpoint,scale=channel,bits=8@0/3.5@5/2@9", ["bits=3.5", "use scale=group, or bits=3"]),
        ("dp-grad=powersgd,rank=8@5", ["begin at iteration 0"]),
        ("dp-grad=powersgd,rank=8@0/4@300/2@100", ["one after the other"]),
        ("dp-grad=powersgd,rank=8@0/0@10", ["rank is 0", "at least 1"]),
        ("dp-grad=powersgd,seed=8@0/9@10", ["seed cannot change", "rank"]),
        ("dp-grad=topk,density=0~0.1@5", ["positive"]),
        ("dp-grad=topk,density=1~0.1", ["1~0.01@2000"]),
        ("dp-grad=topk,density=a@0", ["64@0/32@1000"]),
        ("pp-forward=fixpoint,bits=9@0/4@10", ["bits is 9", "at least 1 and at most 8"]),
        ("pp-forward=delta,cache=9@0/4@10", ["cache cannot change", "bits"]),
    ],
)
def test_invalid_schedules_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        _spec(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_powersgd_keeps_its_factor_when_the_rank_changes() -> None:
    """A falling rank cuts the warm start, a rising rank fills it up; both stay projections of the input."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(1, 20, 6, generator=generator) @ torch.randn(1, 6, 12, generator=generator)
    state = CompressorState()
    errors = []
    for rank in (4, 4, 4, 2, 6, 6):
        total = run_lockstep(PowerSGD(PowerSGDConfig(rank=rank)), [low.clone()], [state])[0].total
        state.commit()
        q = state.get("q")
        assert q is not None
        assert q.shape == (1, 12, rank)
        errors.append(float((total - low).norm() / low.norm()))
    assert errors[3] > errors[2] > errors[4] > errors[5]
    assert errors[5] < 1e-4


def test_a_shape_is_compressed_once_its_rank_pays() -> None:
    plan = CompressionPlan({Point.DP_GRAD: _spec("dp-grad=powersgd,rank=12@0/2@5")})
    assert not plan.rounds(Point.DP_GRAD).should_compress((16, 16))
    assert plan.ever_compresses(Point.DP_GRAD, (16, 16))
    assert not plan.ever_compresses(Point.DP_GRAD, (4, 2))


def test_error_feedback_has_a_default_for_each_point() -> None:
    """On for sums; off for messages, where the residual of one token is noise to the next."""
    usual = {"pp-backward=lowrank": "off", "pp-forward=lowrank": "off", "dp-grad=powersgd": "local"}
    for text, feedback in usual.items():
        assert _spec(text).feedback == feedback
        assert _spec(f"{text},error-feedback=off").feedback == "off"
    assert _spec("pp-backward=lowrank,error-feedback=on").feedback == "lazy"
    assert _spec("pp-backward=lowrank,error-feedback=lazy-mean").feedback == "lazy-mean"


def test_a_warm_up_of_quantized_adam_counts_updates() -> None:
    """Only where second moments are frozen; others count iterations, as their schedules do."""
    for name, first in (("quantized-adam", 7), ("powersgd,rank=2", 4)):
        plan = CompressionPlan({Point.DP_GRAD: _spec(f"dp-grad={name},warmup=4")})
        plan.steps.skipped = 3
        assert [iteration for iteration in range(3, 10) if plan.is_active(Point.DP_GRAD, iteration)] == list(
            range(first, 10)
        )
        assert not plan.is_active(Point.DP_GRAD, -1)
