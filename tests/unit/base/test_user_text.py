"""Texts of users in messages."""

from __future__ import annotations

import pytest

from megatron.base.user_text import shortened


@pytest.mark.parametrize(
    ("length", "expected"), [(0, ""), (60, "x" * 60), (61, "x" * 60 + "..."), (10**6, "x" * 60 + "...")]
)
def test_long_texts_are_cut(length: int, expected: str) -> None:
    assert shortened("x" * length) == expected
