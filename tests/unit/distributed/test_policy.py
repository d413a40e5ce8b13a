"""Changes of compressors while a run trains."""

from __future__ import annotations

import pytest
import torch

from megatron.compression.error_feedback import ErrorFeedback
from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, read_specs
from megatron.compression.state import CompressorState
from megatron.distributed.policy import CompressionPlan


def _spec(text: str) -> Spec:
    ((_, spec),) = read_specs([text], build_registry([]), RunLength(10)).items()
    return spec


def test_a_substitute_takes_the_place_of_a_codec() -> None:
    x, state = torch.ones(4, 2, 64), CompressorState()
    plan = CompressionPlan({Point.PP_FWD: _spec("pp-forward=fixpoint,bits=8")})
    eight_bits = plan.codec(Point.PP_FWD).encode(x, state, None).nbytes
    plan.substitute(Point.PP_FWD, _spec("pp-forward=fixpoint,bits=4"), "pp-forward=fixpoint,bits=4")
    assert plan.codec(Point.PP_FWD).encode(x, state, None).nbytes < 0.7 * eight_bits
    assert plan.substitutes == {Point.PP_FWD: "pp-forward=fixpoint,bits=4"}
    plan.substitute(Point.PP_FWD, None)
    assert plan.codec(Point.PP_FWD).traits.exact
    assert plan.is_turned_off(Point.PP_FWD)
    assert plan.substitutes == {Point.PP_FWD: "pp-forward=fixpoint,bits=4"}  # its states stay in checkpoints
    assert plan.covers(Point.PP_FWD, 0)  # states and their names stay


def test_a_substitute_with_other_error_feedback_is_not_taken_from_a_cache() -> None:
    plan = CompressionPlan({Point.DP_GRAD: _spec("dp-grad=fixpoint,bits=4,error-feedback=on")})
    assert isinstance(plan.rounds(Point.DP_GRAD), ErrorFeedback)
    plan.substitute(Point.DP_GRAD, _spec("dp-grad=fixpoint,bits=4"), "dp-grad=fixpoint,bits=4")
    assert not isinstance(plan.rounds(Point.DP_GRAD), ErrorFeedback)


@pytest.mark.parametrize("declared", [True, False])
def test_evaluations_may_compress_whatever_the_spec_says(declared: bool) -> None:
    plan = CompressionPlan({Point.PP_FWD: _spec(f"pp-forward=fixpoint,eval={'on' if declared else 'off'}")})
    assert plan.activation(Point.PP_FWD).is_active(-1) is declared
    plan.evaluation_overrides = {Point.PP_FWD: not declared}
    assert plan.activation(Point.PP_FWD).is_active(-1) is not declared
