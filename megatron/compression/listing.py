"""Text of ``--list-compressors``: compressors and points, a line each, or the options of a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.base.errors import UserError
from megatron.base.option import FieldOption, field_options, summary_of_class
from megatron.base.user_text import nearest, spell
from megatron.compression.outer import PRESET, PRESETS, OuterOptions
from megatron.compression.points import EXPERT_CODECS, EXPERT_LEGS, EXPERTS, Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.spec import COMMON, FUSED, can_serve, expand_spec

_TENSOR_PARALLEL = "under --sequence-parallel it gathers, by cast, fixpoint or float8"
_CONDITIONS: Mapping[Point, str] = {
    Point.DP_GRAD: "not with --DDP-impl torch",
    Point.EMBED_GRAD: "not with --use-distributed-optimizer; not fused with --DDP-impl torch",
    Point.TP_FWD: _TENSOR_PARALLEL,
    Point.TP_BWD: _TENSOR_PARALLEL,
    Point.PARAM_GATHER: "only with --use-distributed-optimizer",
}
"""Flags of a run that decide whether a point is compressed."""


def list_names(registry: Registry) -> str:
    """Text with a line for each compressor and for each point."""
    lines = ["--compress POINT=NAME[,key=value...], once for each point; --list-compressors NAME shows its options", ""]
    lines += ["compressors:"]
    lines += [f"  {name:<20} {summary_of_class(registry[name].config)}" for name in registry.names]
    lines += ["", "points:"]
    lines += [f"  {point.value:<20} {', '.join(names_at(registry, point))}" for point in Point if point.compressible]
    lines += [f"  {name:<20} both of {', '.join(leg.value for leg in legs)}" for name, legs in EXPERT_LEGS.items()]
    lines += [f"  {f'{EXPERTS}={word}':<20} {' '.join(expand_spec(f'{EXPERTS}={word}'))}" for word in EXPERT_CODECS]
    return "\n".join(lines)


def describe_name(registry: Registry, name: str) -> str:
    """Text about a compressor, or about a point and the options of its own.

    Raises:
        UserError: if the name is neither a compressor nor a point.
    """
    points = {point.value: point for point in Point if point.compressible}
    known_names = {spell(known): known for known in (*registry.names, *points)}
    if spell(name) not in known_names:
        near = nearest(name, list(known_names.values()))
        raise UserError(f"--list-compressors {name}: no such compressor or point{near}; --list-compressors names all")
    name = known_names[spell(name)]
    if name in points:
        point = points[name]
        lines = [f"{name}: {', '.join(names_at(registry, point))}"]
        if point in _CONDITIONS:
            lines.append(_CONDITIONS[point])
        if point is Point.OUTER:
            lines += ["", summary_of_class(OuterOptions), ""]
            lines += ["options of the point, beside those of its compressor:"]
            lines += options_lines(name, OuterOptions)
            lines += [f"  {PRESET:<16} {'|'.join(PRESETS)}: stands for"]
            for preset, words in PRESETS.items():
                lines.append(f"    {preset:<14} {','.join(f'{key}={value}' for key, value in words.items())}")
    else:
        registration = registry[name]
        lines = [f"{name}: {summary_of_class(registration.config)}", "", "points:"]
        for point, feedback in points_of(registration, name).items():
            remarks = [f"error-feedback={feedback}"] if feedback else []
            if point in _CONDITIONS:
                remarks.append(_CONDITIONS[point])
            lines.append(f"  {point.value:<20} {'; '.join(remarks)}".rstrip())
        details = (("needs", registration.needs), ("source", registration.source), ("example", registration.example))
        lines += ["", *(f"{title}: {text}" for title, text in details if text)]
        lines += ["", "options:", *options_lines(name, registration.config)]
    lines += ["", "options of every compressor:", *(f"  {key:<16} {text}" for key, text in COMMON.items())]
    return "\n".join(lines)


def points_of(registration: Registration, name: str) -> dict[Point, str]:
    """Points that a compressor serves, with its default error feedback; empty at points with their own default."""
    return {
        point: "" if point is Point.OUTER else registration.default_feedback(point)
        for point in Point
        if point.compressible and can_serve(registration, point, name)
    }


def names_at(registry: Registry, point: Point) -> list[str]:
    """Names that ``--compress POINT=NAME`` takes at a point."""
    names = [name for name in registry.names if can_serve(registry[name], point, name)]
    return [FUSED, *names] if point is Point.EMBED_GRAD else names


def options_lines(name: str, cls: type[Any]) -> list[str]:
    """A line for each option of an options class."""
    lines = [
        f"  {option.flag:<16} {option_values(option)}, default {option_default(option)}: {option.option.help}"
        + (" (may change: 64@0/32@1000 or 64~8@1000)" if option.option.scheduled else "")
        for option in field_options(name, cls)
    ]
    return lines or ["  none"]


def option_default(option: FieldOption) -> str:
    """Default of a compressor's option, as a spec writes it, or the description of a derived one."""
    if option.is_switch:
        return "on" if option.default else "off"
    return option.option.when_unset if option.default is None else str(option.default)


def option_values(option: FieldOption) -> str:
    """Values that a compressor's option takes: its choices, or their type."""
    return "on|off" if option.is_switch else "|".join(option.choices) or option.element.__name__
