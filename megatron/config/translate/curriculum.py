"""Translation of ``curriculum_learning`` in a DeepSpeed file."""

from __future__ import annotations

from typing import Any

from megatron.base.errors import UserError
from megatron.base.option import field_options
from megatron.base.user_text import Note
from megatron.base.value_type import ValueType
from megatron.base.values import Values
from megatron.config.curriculum import CurriculumConfig, lengths_of

_NAME = "curriculum_learning"
_SECTION = "curriculum"
_CONFIG = "schedule_config"
_KEYS = ("enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", _CONFIG)
_TYPES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_BY_TYPE: dict[str, dict[str, str]] = {
    "fixed_linear": {"curriculum_seqlen_steps": "total_curriculum_step", "curriculum_seqlen_step": "difficulty_step"},
    "fixed_discrete": {"curriculum_discrete_seqlens": "difficulty", "curriculum_discrete_steps": "max_step"},
    "custom": {},
}
_BY_TYPE["fixed_root"] = {**_BY_TYPE["fixed_linear"], "curriculum_root_degree": "root_degree"}
_OLD_STEPS = "total_step"
"""Former name of ``total_curriculum_step``."""


def read_curriculum(content: dict[str, Any], location: str, ignored: Note) -> dict[str, Any] | None:
    """Translate the curriculum of a file to values of our dotted fields; None if it is disabled.

    Args:
        content: value of ``curriculum_learning``.
        location: its location, for messages.
        ignored: called with each key without effect.

    Raises:
        UserError: when a key is missing, unknown or invalid; the message names it.
    """
    _check_keys(content, _KEYS, location)
    values = Values(content, location)
    if not values.flag("enabled"):
        return None
    if values.text("curriculum_type") != "seqlen":
        raise UserError(f"{location}: curriculum_type {content['curriculum_type']!r} is not available; use seqlen")
    kind = ValueType(element=str, choices=_TYPES).from_json(values.text("schedule_type"), f"{location}: schedule_type")
    least, full = values.integer("min_difficulty"), values.integer("max_difficulty")
    settings: dict[str, Any] = {
        "curriculum_learning": True,
        "curriculum_type": kind,
        **_schedule(values, kind, f"{location}: {_CONFIG}"),
    }
    if kind in ("fixed_linear", "fixed_root"):
        settings["curriculum_seqlen_min"] = least
    elif kind == "custom" or settings["curriculum_discrete_seqlens"][:1] != [least]:
        ignored(f"{_NAME}.min_difficulty")
    if kind != "custom":  # a custom function is not in the file
        try:
            lengths_of(CurriculumConfig(**settings), full, lambda name: key_of(name, kind))
        except UserError as error:
            raise UserError(f"{location}: {error}") from error
    return {**{f"{_SECTION}.{name}": value for name, value in settings.items()}, "model.seq_length": full}


def _schedule(values: Values, kind: str, location: str) -> dict[str, Any]:
    """Translate ``schedule_config`` to values of our fields."""
    content = dict(values.table(_CONFIG, {} if kind == "custom" else None))
    if _OLD_STEPS in content:
        content.setdefault("total_curriculum_step", content.pop(_OLD_STEPS))
    keys = _BY_TYPE[kind]
    _check_keys(content, tuple(keys.values()), location)
    schedule = Values(content, location)
    value_types = {field.name: (field.value_type, field.is_list) for field in field_options(_SECTION, CurriculumConfig)}
    settings: dict[str, Any] = {}
    for name, key in keys.items():
        element, is_list = value_types[name]
        if is_list:
            settings[name] = [element.from_json(item, f"{location}: {key}") for item in schedule.listed(key)]
        elif not schedule.has(key):
            raise schedule.wrong(f"{key} is missing")
        else:
            settings[name] = element.from_json(schedule[key], f"{location}: {key}")
    return settings


def _check_keys(content: dict[str, Any], keys: tuple[str, ...], location: str) -> None:
    for name in content:
        if name not in keys:
            raise UserError(f"{location}: {name} is not available; remove it from the file")


def key_of(name: str, kind: str) -> str:
    """Key of a field in the file."""
    if name in _BY_TYPE[kind]:
        return f"{_CONFIG}.{_BY_TYPE[kind][name]}"
    other_keys = {
        "curriculum_type": "schedule_type",
        "curriculum_seqlen_min": "min_difficulty",
        "seq_length": "max_difficulty",
    }
    return other_keys.get(name, name)
