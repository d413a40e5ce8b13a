"""Conditions under which settings have an effect: the ``only_if`` of their declarations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from megatron.base.option import Condition
from megatron.base.user_text import flag_of


def _value(run: Any, path: str) -> object:
    """Value of the field with the dotted name ``path``; of a list with a single element, that element."""
    value = reduce(getattr, path.split("."), run)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _flag(path: str, *values: object) -> str:
    name = flag_of(path)
    return f"{name} {_join_with_or(map(str, values))}" if values else name


def _join_with_or(names: Iterable[str]) -> str:
    *first_names, last = names
    return f"{', '.join(first_names)} or {last}" if first_names else last


def needs(*paths: str) -> Condition:
    """Condition that one of the settings is switched on, above 0, or given."""
    return Condition(
        lambda run, _: any(_value(run, path) for path in paths), f"without {_join_with_or(map(_flag, paths))}"
    )


def when(path: str, *values: object) -> Condition:
    """Condition that the setting has one of these values."""
    return Condition(lambda run, _: _value(run, path) in values, f"without {_flag(path, *values)}")


def unless(path: str, *values: object) -> Condition:
    """Condition that the setting has none of these values; without ``values``, that it is off, 0 or not given."""
    return Condition(
        lambda run, _: _value(run, path) not in values if values else not _value(run, path),
        f"with {_flag(path, *values)}",
    )


EXPERTS = Condition(lambda run, _: run.model.has_experts, "no layer has experts (--num-experts)")
WORDS = Condition(lambda run, _: run.model.predicts_words, "with a task, whose outputs are not words")
HALF_PRECISION = Condition(
    lambda run, _: run.precision.fp16 or run.precision.bf16, "this is fp32 anyway, except with --fp16 or --bf16"
)
SEVERAL_PROCESSES = Condition(lambda _, world_size: world_size > 1, "there is one process")
