"""The reader of documents: places, defaults and remedies around the reader of one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.base.parse_numbers import MOST
from megatron.base.values import Values

CONTENT = {"layers": 4, "lr": 1, "tied": False, "name": "x", "names": ["a", "b"], "rope": {"base": 1.5}, "gone": None}


def test_values_are_what_the_document_holds() -> None:
    values = Values(CONTENT)
    assert (values.integer("layers"), values.number("lr"), values.flag("tied"), values.text("name")) == (
        4,
        1,
        False,
        "x",
    )
    assert (values.texts("names"), Values(values.table("rope")).number("base")) == (["a", "b"], 1.5)
    assert isinstance(values.number("lr"), float)
    assert dict(values) == CONTENT
    assert (values.get("name"), values.get("other")) == ("x", None)


def test_null_is_missing_and_is_told_apart_all_the_same() -> None:
    values = Values(CONTENT)
    assert (values.integer("gone", 7), values.table("gone", {}), values.flag("other", True)) == (7, {}, True)
    assert (values.has("gone"), values.says("gone"), values.says("other")) == (False, True, False)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda v: v.integer("other"), "other is missing"),
        (lambda v: v.integer("gone"), "gone is missing"),
        (lambda v: v.integer("layers", most=3), "layers is 4; it must be at least 1 and at most 3"),
        (lambda v: v.integer("name"), "name: 'x' is not an integer"),
        (lambda v: v.number("tied"), "tied: false is not a number"),
        (lambda v: v.flag("layers"), "layers: 4 is neither true nor false"),
        (lambda v: v.text("names"), "names: expected a text, not a list"),
        (lambda v: v.texts("name"), "name: expected a list, not 'x'"),
        (lambda v: v.table("names"), "names: expected names and values, not a list"),
    ],
)
def test_a_message_has_the_place_before_it_and_the_remedy_behind(ask: Callable[[Values], Any], message: str) -> None:
    for place, remedy, whole in (("", "", message), ("a.json:3", "delete it", f"a.json:3: {message}; delete it")):
        with pytest.raises(UserError) as caught:
            ask(Values(CONTENT, place, remedy))
        assert str(caught.value) == whole


def test_sizes_have_a_bound_unless_they_ask_for_none() -> None:
    values = Values({"size": MOST + 1, "negative": -5})
    with pytest.raises(UserError, match="size is 16_777_217; it must be at least 1 and at most 16_777_216"):
        values.integer("size")
    assert values.integer("negative", least=None, most=None) == -5
