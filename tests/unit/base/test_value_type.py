"""Readers of values: forms of each source, and the same message for the same mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.base.value_type import ValueType

RANK = ValueType(element=int, minimum=1, maximum=128)
SHARE = ValueType(element=float, above=0, below=1)
SWITCH, TEXT = ValueType(element=bool), ValueType(element=str)
DEVICE = ValueType(element=str, choices=("cpu", "cuda-graph", "off"))
KINDS = [RANK, SHARE, SWITCH, TEXT, DEVICE]


@pytest.mark.parametrize(
    ("kind", "text", "plain", "exact", "value"),
    [
        (RANK, "1_2", [12, 12.0, "12"], 12, 12),
        (SHARE, ".5", [0.5, "0.5"], 0.5, 0.5),
        (SWITCH, "Yes", [True, "on", 1], True, True),
        (SWITCH, "off", [False, "no", 0], False, False),
        (TEXT, "12", [12, "12"], "12", "12"),
        (DEVICE, "CUDA_graph", ["cuda-graph"], "cuda-graph", "cuda-graph"),
        (DEVICE, "off", [False, "OFF"], "off", "off"),
    ],
)
def test_each_source_has_its_forms_of_a_value(
    kind: ValueType, text: str, plain: list[Any], exact: Any, value: Any
) -> None:
    for result in (
        kind.from_text(text, "x"),
        *(kind.from_plain(source, "x") for source in plain),
        kind.from_json(exact, "x"),
    ):
        assert (result, type(result)) == (value, type(value))


def test_json_values_are_not_converted() -> None:
    cases: list[tuple[ValueType, list[Any]]] = [
        (RANK, ["12", 12.0, True, None, [1], {}]),
        (SHARE, ["0.5", True, None]),
        (SWITCH, [1, 0, "true", None]),
        (TEXT, [12, True, None, ["a"]]),
    ]
    for kind, values in cases:
        for value in values:
            with pytest.raises(UserError):
                kind.from_json(value, "x")
    number = ValueType(element=float).from_json(2, "x")
    assert (number, type(number)) == (2.0, float)


@pytest.mark.parametrize(
    ("kind", "text", "value", "message"),
    [
        (RANK, "two", "two", "x: 'two' is not an integer"),
        (RANK, "1.5", 1.5, "x: {} is not an integer"),
        (RANK, "9" * 30, 10**30 - 1, "x: {} is too large an integer"),
        (SHARE, "half", "half", "x: 'half' is not a number"),
        (SHARE, "nan", float("nan"), "x: {} is not a finite number"),
        (SWITCH, "2", 2, "x: {} is neither true nor false"),
        (SWITCH, "maybe", "maybe", "x: 'maybe' is neither true nor false"),
        (DEVICE, "tpu", "tpu", "x: 'tpu' is not one of cpu, cuda-graph, off"),
    ],
)
def test_a_mistake_has_the_same_message_in_all_sources(kind: ValueType, text: str, value: Any, message: str) -> None:
    for read, given_value, text_of_value in (
        (kind.from_text, text, repr(text)),
        (kind.from_plain, value, repr(value)),
        (kind.from_json, value, repr(value)),
    ):
        with pytest.raises(UserError) as caught:
            read(given_value, "x")
        assert str(caught.value) == message.format(text_of_value)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (RANK, 0, "x is 0; it must be at least 1 and at most 128"),
        (RANK, 10**6, "x is 1_000_000; it must be at least 1 and at most 128"),
        (SHARE, 0.0, "x is 0.0; it must be above 0 and below 1"),
        (SHARE, 1.0, "x is 1.0; it must be above 0 and below 1"),
    ],
)
def test_bounds_are_named_in_words(kind: ValueType, value: float, message: str) -> None:
    for check in (kind.check_bounds, kind.from_json):
        with pytest.raises(UserError) as caught:
            check(value, "x")
        assert str(caught.value) == message


def test_inclusive_bounds_are_valid_values() -> None:
    assert [RANK.from_json(value, "x") for value in (1, 128)] == [1, 128]
    assert [SHARE.from_json(value, "x") for value in (1e-9, 1 - 1e-9)] == [1e-9, 1 - 1e-9]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**5000), 10**5000) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(KINDS), value=_VALUES)
def test_any_value_is_read_or_refused_in_one_short_line(kind: ValueType, value: Any) -> None:
    reads = [kind.from_plain, kind.from_json] + ([kind.from_text] if isinstance(value, str) else [])
    for read in reads:
        message = "no error"
        try:
            result = read(value, "x")
        except UserError as error:
            result = message = str(error)
        assert len(message.splitlines()) == 1
        assert len(message) < 300
        json.dumps(result, allow_nan=False)


def test_a_percentage_may_end_with_a_percent_sign() -> None:
    kind = ValueType(element=float, percent=True)
    assert [kind.from_text(text, "x") for text in ("0.5", "0.5%", " 12 %")] == [0.5, 0.5, 12.0]
    assert kind.from_plain("0.2%", "x") == 0.2
    for plain_kind, text in ((kind, "5%%"), (ValueType(element=float), "0.5%")):
        with pytest.raises(UserError, match="is not a number"):
            plain_kind.from_text(text, "x")
