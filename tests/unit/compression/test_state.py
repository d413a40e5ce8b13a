"""Staging, commit and rollback of a compressor's state, against a plain dictionary."""

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
def test_reads_see_the_newest_value_until_rollback(actions: list[tuple[str, str, int]]) -> None:
    state = CompressorState()
    committed: dict[tuple[str, str], int] = {}
    newest: dict[tuple[str, str], int] = {}
    for action, name, value in actions:
        if action == "commit":
            state.commit()
            committed = dict(newest)
        elif action == "rollback":
            state.rollback()
            newest = dict(committed)
        else:
            state.stage(name, torch.tensor(value) if action == "tensor" else value)
            newest[action, name] = value
        for each in NAMES:
            tensor = state.get(each)
            assert (None if tensor is None else int(tensor)) == newest.get(("tensor", each))
            assert state.count(each) == newest.get(("counter", each), 0)
        assert {n: int(t) for n, t in state.tensors.items()} == {
            n: v for (w, n), v in committed.items() if w == "tensor"
        }
        assert state.counters == {n: v for (w, n), v in committed.items() if w == "counter"}


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
    state, other = CompressorState(), CompressorState()
    state.stage("x", torch.ones(1))
    state.stage("n", 3)
    state.commit()
    assert other.get("x") is None
    assert other.count("n") == 0
    assert isinstance(state.get("x"), Tensor)
