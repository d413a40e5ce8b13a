"""The registry of state that survives a restart, shared by saving and loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.base.stateful import Scope, StatefulParts, migrate_saved_values


class _Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def _registry(optimizer: _Counter, position: _Counter) -> StatefulParts:
    registry = StatefulParts()
    registry.register("one", optimizer, Scope.OPTIMIZER)
    registry.register("other", position, Scope.POSITION)
    registry.register_value("kind", lambda: "a", None, Scope.DESCRIPTION)
    return registry


def test_registered_state_is_saved_and_restored() -> None:
    saved = _registry(_Counter(3), _Counter(4)).state_dict()
    assert saved == {"one": {"count": 3}, "other": {"count": 4}, "kind": "a"}
    optimizer, position = _Counter(), _Counter()
    registry = _registry(optimizer, position)
    registry.check_names(saved)
    registry.load_state_dict(saved, [Scope.OPTIMIZER, Scope.POSITION])
    assert (optimizer.count, position.count) == (3, 4)


def test_other_scopes_are_not_restored() -> None:
    optimizer, position = _Counter(1), _Counter(2)
    _registry(optimizer, position).load_state_dict({"other": {"count": 9}}, [Scope.POSITION])
    assert (optimizer.count, position.count) == (1, 9)


def test_saved_but_unregistered_state_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^third: .*cannot restore it; .*--finetune"):
        _registry(_Counter(), _Counter()).check_names({"one": {}, "third": {}})


def test_registered_but_unsaved_state_is_an_error() -> None:
    with pytest.raises(KeyError, match="one"):
        _registry(_Counter(), _Counter()).load_state_dict({}, [Scope.OPTIMIZER])


def test_state_that_would_be_lost_cannot_be_registered() -> None:
    registry = _registry(_Counter(), _Counter())
    with pytest.raises(ValueError, match="registered already"):
        registry.register("one", _Counter(), Scope.OPTIMIZER)
    with pytest.raises(ValueError, match="never restored"):
        registry.register_value("new", lambda: 1, None, Scope.OPTIMIZER)


def test_values_of_earlier_versions_get_current_names() -> None:
    old = {"optimizer_steps": 4, "rank_controller": {"rank": 8.0}}
    controllers = {"dp-grad": {"compressor": "edgc", "state": {"rank": 8.0}}}
    today = {"optimizer_steps": 4, "variance_frozen_at": 0, "controllers": controllers, "expert_loads": {}, "outer": {}}
    today |= {"tracked_runs": {}, "compression_choice": {}, "certificate": {}, "delayed_gradients": {}}
    today |= {"pipeline_schedule": {}}
    assert migrate_saved_values(old) == today
    assert migrate_saved_values(today) == today
