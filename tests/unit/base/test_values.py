"""Reader of documents: locations, defaults and remedies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.base.parse_numbers import MAX_SIZE
from megatron.base.values import Values

CONTENT = {"layers": 4, "lr": 1, "tied": False, "name": "x", "names": ["a", "b"], "rope": {"base": 1.5}, "gone": None}


def test_values_are_those_of_the_document() -> None:
    values = Values(CONTENT)
    assert (values.integer("layers"), values.number("lr"), values.flag("tied"), values.text("name")) == (
        4,
        1,
        False,
        "x",
    )
    assert (values.texts("names"), values.table("rope").number("base")) == (["a", "b"], 1.5)
    assert isinstance(values.number("lr"), float)
    assert dict(values) == CONTENT
    assert (values.get("name"), values.get("other")) == ("x", None)


def test_null_counts_as_missing_but_can_be_distinguished() -> None:
    values = Values(CONTENT)
    assert (values.integer("gone", 7), dict(values.table("gone", {})), values.flag("other", True)) == (7, {}, True)
    assert (values.has("gone"), "gone" in values, "other" in values) == (False, True, False)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda v: v.integer("other"), "other is missing"),
        (lambda v: v.integer("gone"), "gone is missing"),
        (lambda v: v.integer("layers", maximum=3), "layers is 4; it must be at least 1 and at most 3"),
        (lambda v: v.integer("name"), "name: 'x' is not an integer"),
        (lambda v: v.number("tied"), "tied: false is not a number"),
        (lambda v: v.flag("layers"), "layers: 4 is neither true nor false"),
        (lambda v: v.text("names"), "names: expected text, not a list"),
        (lambda v: v.texts("name"), "name: expected a list, not 'x'"),
        (lambda v: v.table("names"), "names: expected names and values, not a list"),
    ],
)
def test_a_message_starts_with_the_location_and_ends_with_the_remedy(
    ask: Callable[[Values], Any], message: str
) -> None:
    for location, remedy, full_message in (
        ("", "", message),
        ("a.json:3", "delete it", f"a.json:3: {message}; delete it"),
    ):
        with pytest.raises(UserError) as caught:
            ask(Values(CONTENT, location, remedy))
        assert str(caught.value) == full_message


def test_sizes_are_bounded_by_default() -> None:
    values = Values({"size": MAX_SIZE + 1, "negative": -5})
    with pytest.raises(UserError, match="size is 16_777_217; it must be at least 1 and at most 16_777_216"):
        values.integer("size")
    assert values.integer("negative", minimum=None, maximum=None) == -5
