"""Plain values survive JSON exactly; other objects are refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.plain import decode_plain, encode_plain

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
KEYS = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.just("$tuple")
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal, with the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert same(decode_plain(encode_plain(value)), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    loaded = decode_plain(encode_plain({"x": tensor}))["x"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)


def test_generator_states_round_trip() -> None:
    state = {"python": random.getstate(), "torch": torch.get_rng_state(), "nan": float("nan")}
    loaded = decode_plain(encode_plain(state))
    assert loaded["python"] == state["python"]
    assert torch.equal(loaded["torch"], torch.get_rng_state())
    assert loaded["nan"] != loaded["nan"]


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a Random"):
        encode_plain({"a": [0, random.Random()]})


@pytest.mark.parametrize("text", [b"{", b'{"$tensor": 3}', b'{"$tensor": ["nn", [1], ""]}', b'{"$bytes": "?"}'])
def test_garbage_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode_plain(text)
