"""The registry of what survives a restart: saving and loading read the same one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.base.stateful import Scope, StatefulParts, under_todays_names


class _Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def _parts(one: _Counter, other: _Counter) -> StatefulParts:
    parts = StatefulParts()
    parts.register("one", one, Scope.OPTIMIZER)
    parts.register("other", other, Scope.POSITION)
    parts.register_value("kind", lambda: "a", None, Scope.DESCRIPTION)
    return parts


def test_what_is_registered_is_saved_and_comes_back() -> None:
    saved = _parts(_Counter(3), _Counter(4)).state_dict()
    assert saved == {"one": {"count": 3}, "other": {"count": 4}, "kind": "a"}
    one, other = _Counter(), _Counter()
    parts = _parts(one, other)
    parts.check_names(saved)
    parts.load_state_dict(saved, [Scope.OPTIMIZER, Scope.POSITION])
    assert (one.count, other.count) == (3, 4)


def test_a_scope_that_is_not_asked_for_stays_as_it_is() -> None:
    one, other = _Counter(1), _Counter(2)
    _parts(one, other).load_state_dict({"other": {"count": 9}}, [Scope.POSITION])
    assert (one.count, other.count) == (1, 9)


def test_what_was_saved_and_is_not_restored_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^third: .*cannot restore it; .*--finetune"):
        _parts(_Counter(), _Counter()).check_names({"one": {}, "third": {}})


def test_what_is_registered_and_was_not_saved_is_an_error() -> None:
    with pytest.raises(KeyError, match="one"):
        _parts(_Counter(), _Counter()).load_state_dict({}, [Scope.OPTIMIZER])


def test_nothing_can_be_registered_that_would_be_lost() -> None:
    parts = _parts(_Counter(), _Counter())
    with pytest.raises(ValueError, match="registered already"):
        parts.register("one", _Counter(), Scope.OPTIMIZER)
    with pytest.raises(ValueError, match="never restored"):
        parts.register_value("new", lambda: 1, None, Scope.OPTIMIZER)


def test_an_earlier_versions_values_get_todays_names() -> None:
    old = {"optimizer_steps": 4, "rank_controller": {"rank": 8.0}}
    controllers = {"dp-grad": {"compressor": "edgc", "state": {"rank": 8.0}}}
    today = {"optimizer_steps": 4, "variance_frozen_at": 0, "controllers": controllers, "expert_loads": {}, "outer": {}}
    today["tracked_runs"] = {}
    assert under_todays_names(old) == today
    assert under_todays_names(today) == today
