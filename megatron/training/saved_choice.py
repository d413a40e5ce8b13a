"""The choice of ``--compress auto`` in checkpoints: saved with each, and kept by runs that resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import named_points, point_name, read_specs
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.distributed.agreement import run_together
from megatron.distributed.layout import Layout
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.planner.settings import FREE_SETTINGS, Settings, drop_user_settings, flags_of
from megatron.training.loss_guard import LossGuard
from megatron.training.saved_run import SavedRun
from megatron.training.step_time_check import StepTimeCheck

CHOICE = "compression_choice"
"""Name of the choice in a checkpoint."""

_REMEDY = "load another checkpoint, or name the specs"


def keep_choice(
    config: RunConfig,
    topology: Topology,
    saved: SavedRun | None,
    flag_fields: Collection[str],
    log: Callable[[str], None],
) -> tuple[RunConfig, Settings] | None:
    """Take over the specs and settings that the checkpoint's run chose, beside those of the user. A collective call.

    Args:
        config: resolved configuration.
        topology: the ranks.
        saved: the checkpoint that the run begins with, if any.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
        log: prints lines for the user, on one rank.

    Returns:
        The configuration with these specs and settings, and the settings; None if ``--compress auto`` has to choose.

    Raises:
        UserError: on every rank, when the checkpoint's values are damaged.
    """
    if not config.compression.is_auto:
        return config, {}
    if saved is None or config.checkpoint.finetune:
        return None
    return run_together(topology.control.pg, lambda: _kept_config(config, topology, saved, flag_fields, log))


def describe_choice(
    config: RunConfig,
    layout: Layout,
    plan: CompressionPlan,
    loss_guard: LossGuard | None = None,
    time_check: StepTimeCheck | None = None,
    settings: Settings = MappingProxyType({}),
) -> dict[str, Any]:
    """Describe a choice for checkpoints: its specs or their replacements, its settings, the layout and the budget that
    they were chosen for, and the results of their checks. Empty without ``--compress auto``."""
    compression = config.compression
    if not compression.is_auto:
        return {}
    specs = {Point(point_name(spec)): spec for spec in compression.chosen_specs}
    specs |= {point: text for point, text in plan.substitutes.items() if point in specs}
    turned_off = [point.value for point in specs if plan.is_turned_off(point)]
    return {
        "specs": list(specs.values()),
        "turned_off": turned_off,
        "settings": list(settings),
        "layout": _layout_sizes(layout),
        "max_loss_increase": compression.max_loss_increase,
        "adapts": compression.compress_adapt,
        "loss_checks": {} if loss_guard is None else loss_guard.state_dict(),
        "loss_check_interval": None if loss_guard is None else loss_guard.interval,
        "s_per_token": None if time_check is None else time_check.expected_s_per_token,
        "step_tokens": None if time_check is None else time_check.expected_tokens,
    }


def specs_in_use(choice: Mapping[str, Any]) -> list[str]:
    """Specs of a description from ``describe_choice`` whose compressors are not turned off."""
    return [spec for spec in choice["specs"] if point_name(spec) not in choice["turned_off"]]


@dataclass(frozen=True)
class SavedChecks:
    """Results of the checks of a choice when the checkpoint was saved.

    Args:
        loss: value of ``LossGuard.state_dict``, by point.
        interval: iterations between checks; None for earlier versions.
        s_per_token: expected seconds of a step over its tokens; None if they were not known yet.
        step_tokens: tokens of those steps; None if they are not known.
    """

    loss: Mapping[str, Values] = field(default_factory=dict)
    interval: int | None = None
    s_per_token: float | None = None
    step_tokens: int | None = None


def restore_choice(saved: SavedRun, config: RunConfig, plan: CompressionPlan) -> SavedChecks:
    """Turn off the compressors that the checkpoint's run has turned off, and return the results of its checks.

    For a run that keeps the checkpoint's choice.

    Raises:
        UserError: when the checkpoint's values are damaged.
    """
    chosen_points = {point_name(spec) for spec in config.compression.chosen_specs}
    choice = Values(saved.common[CHOICE], config.checkpoint.source, _REMEDY)
    for point in _turned_off(choice):
        if point.value in chosen_points:
            plan.substitute(point, None)
    checks = choice.table("loss_checks", {})
    return SavedChecks(
        {name: checks.table(name) for name in checks},
        choice.integer("loss_check_interval") if choice.has("loss_check_interval") else None,
        choice.number("s_per_token", minimum=0.0) if choice.has("s_per_token") else None,
        choice.integer("step_tokens", maximum=None) if choice.has("step_tokens") else None,
    )


def _turned_off(choice: Values) -> list[Point]:
    """Points whose compressors were turned off; none in choices of earlier versions."""
    names = choice.texts("turned_off") if choice.has("turned_off") else []
    try:
        return [Point(name) for name in names]
    except ValueError as error:
        raise choice.wrong(f"turned_off: {error}") from error


def _layout_sizes(layout: Layout) -> list[int]:
    return [layout.tp, layout.pp, layout.dp, layout.ep]


def _kept_config(
    config: RunConfig, topology: Topology, saved: SavedRun, flag_fields: Collection[str], log: Callable[[str], None]
) -> tuple[RunConfig, Settings] | None:
    """The result of ``keep_choice``: None to choose again. The user's specs and settings take precedence.

    Raises:
        UserError: when the checkpoint's values are damaged.
    """
    location = f"{config.checkpoint.source}, the choice of --compress auto"
    values = Values(saved.common, location, _REMEDY).table(CHOICE, {})
    if not values:
        return None
    specs, sizes, budget = values.texts("specs"), values.integers("layout"), values.number("max_loss_increase")
    try:
        read_specs(specs, build_registry(config.compression.compress_module), RunLength(config.training.planned_iters))
    except UserError as error:
        raise values.wrong(str(error)) from error
    user_points = named_points(config.compression.spec_texts)
    turned_off = [point.value for point in _turned_off(values) if point.value not in user_points]
    kept_specs = [spec for spec in specs if point_name(spec) not in user_points]
    names = values.texts("settings") if values.has("settings") else []  # choices of earlier versions have none
    unknown = [name for name in names if name not in FREE_SETTINGS]
    if unknown:
        raise values.wrong(f"settings: unknown {', '.join(unknown)}")
    settings = drop_user_settings({name: FREE_SETTINGS[name] for name in names}, flag_fields)
    defaults = ParallelConfig()
    for name in list(settings):
        if getattr(config.parallel, name) not in (settings[name], getattr(defaults, name)):
            del settings[name]  # a file sets another value
    reason, kept_config = "", None
    if config.compression.compress_adapt and not values.flag("adapts", False):
        reason = "--compress-adapt is given"
    elif sizes != _layout_sizes(topology.layout):
        reason = "the layout has changed"
    elif config.compression.max_loss_increase < budget:
        reason = f"--max-loss-increase is below {budget:g}"
    else:
        try:
            kept_config = with_choice(config, kept_specs, settings, topology)
        except UserError as error:
            reason = f"its choice no longer fits ({error})"
    specs_text = " ".join([*kept_specs, *flags_of(settings)]) or "nothing"
    log(
        f"--compress auto: chooses again, since {reason}; the checkpoint's run had {specs_text}"
        if kept_config is None
        else f"--compress auto: keeps the choice of the checkpoint's run: {specs_text}"
        + (f"; turned off since: {', '.join(turned_off)}" if turned_off else "")
    )
    return None if kept_config is None else (kept_config, settings)


def with_choice(config: RunConfig, chosen_specs: list[str], settings: Settings, topology: Topology) -> RunConfig:
    """The resolved configuration with chosen specs beside those of the user, and chosen settings."""
    compression = config.compression.with_choice(config.compression.spec_texts, chosen_specs)
    parallel = dataclasses.replace(config.parallel, **settings)  # type: ignore[arg-type]
    config = dataclasses.replace(config, compression=compression, parallel=parallel)
    return config.resolve(topology.layout.world_size, cuda_available=torch.cuda.is_available())
