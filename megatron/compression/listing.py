"""Text of ``--list-compressors``: points, compressors, options and defaults."""

from __future__ import annotations

from typing import Any

from megatron.base.option import FieldOption, field_options
from megatron.compression.outer import PRESET, PRESETS
from megatron.compression.points import EXPERT_CODECS, EXPERT_LEGS, EXPERTS, Point
from megatron.compression.registry import Registry
from megatron.compression.spec import COMMON, FUSED, OF_POINT, serves, specs_by_point

_TOGETHER = (
    "any compressors at different points, on any tensor-, pipeline- and data-parallel layout, with any precision",
    "--use-distributed-optimizer: all but compressors at embedding; param-gather has traffic only with it",
    "--sequence-parallel: its gathers at tp-forward and tp-backward take cast, fixpoint and float8, not powersgd",
    "--DDP-impl torch: nothing at dp-grad, and no fused embedding",
    "which to use, by traffic and link: docs/compression.md, Which one to use",
)


def describe(registry: Registry) -> str:
    """Text that lists points, compressors, options and defaults."""
    lines = ["--compress POINT=NAME[,key=value...], once for each point", "", "points:"]
    for point in Point:
        if point.compressible:
            names = [name for name in registry.names if serves(registry[name], point, name)]
            extra = [FUSED] if point is Point.EMBED_GRAD else []
            lines.append(f"  {point.value:<20} {', '.join(extra + names)}")
    lines += [f"  {name:<20} both of {', '.join(leg.value for leg in legs)}" for name, legs in EXPERT_LEGS.items()]
    lines += [f"  {f'{EXPERTS}={word}':<20} {' '.join(specs_by_point(f'{EXPERTS}={word}'))}" for word in EXPERT_CODECS]
    lines += ["", "options of every compressor:"]
    lines += [f"  {key:<16} {text}" for key, text in COMMON.items()]
    needs: dict[str, list[str]] = {}
    for name in registry.names:
        needs.setdefault(registry[name].needs, []).append(name)
    requirements = [f"{', '.join(names)}: {text}" for text, names in needs.items() if text]
    lines += ["", "what goes together:", *(f"  {line}" for line in (*_TOGETHER, *requirements))]
    for point, cls in OF_POINT.items():
        lines += [
            "",
            f"{point.value}: {(cls.__doc__ or '').strip().splitlines()[0]} Options of the point, beside those of ",
        ]
        lines[-1] += "its compressor:"
        lines += _options_of(point.value, cls)
        lines += [f"  {PRESET:<16} {'|'.join(PRESETS)}: stands for"]
        lines += [f"    {name:<14} {','.join(f'{k}={v}' for k, v in words.items())}" for name, words in PRESETS.items()]
    for name in registry.names:
        registration = registry[name]
        summary = (registration.config.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"{name}: {summary}"]
        lines += _options_of(name, registration.config)
        usual = [f"{kind} at {point.value}" for point, kind in registration.feedback.items() if kind != "off"]
        if usual:
            lines.append(f"  {'error-feedback':<16} default {', '.join(usual)}")
    return "\n".join(lines)


def _options_of(name: str, cls: type[Any]) -> list[str]:
    """A line for each option."""
    lines = []
    for option in field_options(name, cls):
        default = ("on" if option.default else "off") if isinstance(option.default, bool) else option.default
        default = option.option.when_unset if default is None else default
        over = " (may change: 64@0/32@1000 or 64~8@1000)" if option.option.scheduled else ""
        lines.append(f"  {option.flag:<16} {_kind(option)}, default {default}: {option.option.help}{over}")
    return lines


def _kind(option: FieldOption) -> str:
    return "on|off" if option.is_switch else "|".join(option.choices) or option.element.__name__
