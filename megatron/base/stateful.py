"""Registry of the state, other than tensors, that must survive a restart."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.base.errors import UserError


class Stateful(Protocol):
    """An object whose state is plain values."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state as plain values, equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


class Scope(enum.Enum):
    """Kind of a registered part; a run may restore only some kinds from a checkpoint."""

    OPTIMIZER = enum.auto()
    """Skipped together with the optimizer's state."""
    SCHEDULE = enum.auto()
    """The learning-rate schedule."""
    POSITION = enum.auto()
    """The position of the run."""
    LOGS = enum.auto()
    """Where the run is logged."""
    DESCRIPTION = enum.auto()
    """Describes the checkpoint's tensors; read before them and never restored."""


@dataclass(frozen=True)
class _StatefulPart:
    save: Callable[[], Any]
    load: Callable[[Any], None] | None
    scope: Scope


class StatefulParts:
    """The registered parts of a run, by their names in checkpoints."""

    def __init__(self) -> None:
        self._parts: dict[str, _StatefulPart] = {}

    def register(self, name: str, stateful: Stateful | None, scope: Scope) -> None:
        """Register an object. None saves an empty value, and restores nothing.

        Raises:
            ValueError: when the name is taken.
        """
        if stateful is None:
            self.register_value(name, dict, lambda saved: None, scope)
        else:
            self.register_value(name, stateful.state_dict, stateful.load_state_dict, scope)

    def register_value(
        self, name: str, save: Callable[[], Any], load: Callable[[Any], None] | None, scope: Scope
    ) -> None:
        """Register a value.

        Args:
            name: name of the value.
            save: returns the value, made of plain types, equal on all ranks.
            load: restores the value; None with ``Scope.DESCRIPTION``.
            scope: kind of the value.

        Raises:
            ValueError: when the name is taken, or the value would be saved and never restored, or the reverse.
        """
        if name in self._parts:
            raise ValueError(f"a part named {name!r} is registered already; choose another name")
        if (load is None) != (scope is Scope.DESCRIPTION):
            raise ValueError(f"the part {name!r} would be saved and never restored, or the reverse")
        self._parts[name] = _StatefulPart(save, load, scope)

    def state_dict(self) -> dict[str, Any]:
        """The states of all registered parts."""
        return {name: part.save() for name, part in self._parts.items()}

    def check_names(self, saved: Mapping[str, Any]) -> None:
        """Check the names in a checkpoint against the registered parts, before any part is restored.

        Raises:
            UserError: when the checkpoint holds a name that no part restores.
        """
        unknown = sorted(set(saved) - set(self._parts))
        if unknown:
            raise UserError(
                f"{', '.join(unknown)}: saved by a run of another version, and this one cannot restore it; load with "
                "the version that saved it, or the weights alone with --finetune"
            )

    def load_state_dict(self, saved: Mapping[str, Any], scopes: Collection[Scope]) -> None:
        """Restore the parts of the given scopes.

        Raises:
            KeyError: when a part is missing.
        """
        for name, part in self._parts.items():
            if part.load is not None and part.scope in scopes:
                part.load(saved[name])


def migrate_saved_values(common: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values saved by an earlier version: rename them, and add empty values for later parts."""
    values = {
        "variance_frozen_at": 0,
        "controllers": {},
        "expert_loads": {},
        "outer": {},
        "tracked_runs": {},
        "compression_choice": {},
        "certificate": {},
        "pipeline_schedule": {},
        "delayed_gradients": {},
        **common,
    }
    if "rank_controller" in values:
        values["controllers"] = {"dp-grad": {"compressor": "edgc", "state": values.pop("rank_controller")}}
    return values
