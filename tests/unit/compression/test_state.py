"""Staging, committing and forgetting a compressor's state, against a plain dictionary."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.compression.state import CompressorState

NAMES = ("a", "b", "c")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("tensor"), st.sampled_from(NAMES), st.integers(-5, 5)),
        st.tuples(st.just("counter"), st.sampled_from(NAMES), st.integers(-5, 5)),
        st.tuples(st.just("commit"), st.none(), st.none()),
        st.tuples(st.just("rollback"), st.none(), st.none()),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_reads_see_the_newest_value_and_rollback_forgets(actions: list[tuple[str, str, int]]) -> None:
    state = CompressorState()
    kept: dict[tuple[str, str], int] = {}
    newest: dict[tuple[str, str], int] = {}
    for what, name, value in actions:
        if what == "commit":
            state.commit()
            kept = dict(newest)
        elif what == "rollback":
            state.rollback()
            newest = dict(kept)
        else:
            state.stage(name, torch.tensor(value) if what == "tensor" else value)
            newest[what, name] = value
        for each in NAMES:
            tensor = state.get(each)
            assert (None if tensor is None else int(tensor)) == newest.get(("tensor", each))
            assert state.count(each) == newest.get(("counter", each), 0)
        assert {n: int(t) for n, t in state.tensors.items()} == {n: v for (w, n), v in kept.items() if w == "tensor"}
        assert state.counters == {n: v for (w, n), v in kept.items() if w == "counter"}


def test_staging_leaves_the_committed_tensor_alone() -> None:
    first, second = torch.ones(2), torch.zeros(2)
    state = CompressorState(tensors={"residual": first})
    state.stage("residual", second)
    assert state.get("residual") is second
    assert state.tensors["residual"] is first
    assert torch.equal(first, torch.ones(2))
    state.rollback()
    assert state.get("residual") is first


def test_states_share_nothing() -> None:
    one, other = CompressorState(), CompressorState()
    one.stage("x", torch.ones(1))
    one.stage("n", 3)
    one.commit()
    assert other.get("x") is None
    assert other.count("n") == 0
    assert isinstance(one.get("x"), Tensor)
