"""``--compress auto``: choice of compressors and settings by rates measured on this machine before the first step."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import named_points, point_name, read_specs
from megatron.config.memory import memory_of_this_machine
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.distributed.agreement import any_rank, gather_texts, run_together, take_from_rank_0
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.topology import Topology
from megatron.planner.auto import NOTHING_TO_CHOOSE, AutoChoice, AutoSearch, fit_together, report
from megatron.planner.candidates import candidate_specs, filter_by_budget, read_ladders
from megatron.planner.choice import NOT_PLANNED, make_choice, resolve_for_planning
from megatron.planner.cluster import Cluster, Device
from megatron.planner.compressor_search import CompressorSet
from megatron.planner.measure import fill_in_measured, measure_all
from megatron.planner.predict import Predictor
from megatron.planner.settings import FREE_SETTINGS, Settings, drop_user_settings, flags_of, list_free_settings
from megatron.planner.suggestions import suggestions
from megatron.planner.trials import num_sets_to_time
from megatron.training.loss_guard import LossGuard
from megatron.training.saved_run import SavedRun
from megatron.training.schedule_choice import StageTimes
from megatron.training.step_time_check import StepTimeCheck
from megatron.training.trial_steps import SetTime, predict_stages

CHOICE = "compression_choice"
"""Name of the choice in a checkpoint."""

TimeSets = Callable[[Sequence[RunConfig], Sequence[float], Sequence[StageTimes | None], bool, float], Sequence[SetTime]]

_REMEDY = "load another checkpoint, or name the specs"


def check_auto(config: RunConfig, world_size: int) -> None:
    """Check that the compressors of a run can be chosen.

    Args:
        config: resolved configuration.
        world_size: number of processes.

    Raises:
        UserError: when they cannot.
    """
    if not config.compression.is_auto:
        return
    if config.islands.several:
        raise UserError("--compress auto: chooses within one island only, and islands must not differ; name the specs")
    if config.model.model_type in NOT_PLANNED:
        raise UserError(f"--compress auto: the planner does not know {config.model.model_type} models; name the specs")
    try:
        resolve_for_planning(config, world_size)
    except UserError as error:
        raise UserError(f"--compress auto: cannot predict this run ({error}); name the specs") from error
    if config.compression.compress_adapt and (config.checkpoint.save is None or config.checkpoint.no_save_optim):
        raise UserError(
            "--compress-adapt: the run saves itself before it chooses again; give --save, and leave --no-save-optim out"
        )


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


def choose_compressors(
    config: RunConfig,
    topology: Topology,
    env: LaunchEnvironment,
    vocab_size: int,
    train_iters: int,
    flag_fields: Collection[str],
    time_sets: TimeSets | None,
    log: Callable[[str], None],
) -> tuple[RunConfig, AutoChoice | None]:
    """Choose the compressors of ``--compress auto``, and settings that change no result. A collective call.

    The planner predicts all sets of compressors with measured rates; then training steps are timed with the best and
    without any.

    Args:
        config: resolved configuration.
        topology: the ranks.
        env: environment of this process.
        vocab_size: entries of the vocabulary.
        train_iters: iterations of the run.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
        time_sets: times training steps, given resolved configurations (the first without compressors), their predicted
            times and those of their stages, whether to keep all engines at the same time, and the seconds that the
            choice has taken so far. None if no step is left to take.
        log: prints lines for the user, on one rank.

    Returns:
        The configuration with the chosen specs and settings, the same on all ranks; and the choice, if there was any.

    Raises:
        UserError: on every rank, when the run cannot be predicted.
    """
    group, user_specs = topology.control.pg, config.compression.spec_texts
    if time_sets is None:
        log("--compress auto: chooses nothing, since no step is left to train")
        return with_choice(config, [], {}, topology), None
    cluster = _describe_cluster(topology, env)
    ladders = run_together(group, lambda: read_ladders(config, make_choice(config, cluster.gpus), cluster))
    free_settings = list_free_settings(config, make_choice(config, cluster.gpus), flag_fields)
    if not ladders and not free_settings:
        log(NOTHING_TO_CHOOSE)
        return with_choice(config, [], {}, topology), None
    # The optimizers of every run import it, which takes longer than some trial steps.
    importlib.import_module("torch._dynamo")
    start, on_cpu = time.perf_counter(), topology.device.type == "cpu"
    specs = [*user_specs, *candidate_specs(filter_by_budget(ladders, config.compression.max_loss_increase))]
    with torch.random.fork_rng(devices=[] if on_cpu else [topology.device]):
        values = measure_all(config, vocab_size, specs, topology, cluster.gpus_per_node)
    if not on_cpu:
        torch.cuda.empty_cache()
    measured_cluster = fill_in_measured(values, cluster)
    search = run_together(
        group,
        lambda: AutoSearch.of_run(
            Predictor(config, measured_cluster, vocab_size),
            make_choice(config, measured_cluster.gpus),
            ladders,
            config.compression.max_loss_increase,
            measured_cluster.device.memory_gib,
            free_settings,
        ),
    )
    is_first = topology.rank == 0  # the others search nothing: they may share its processors

    def select_sets() -> list[CompressorSet]:
        fastest_s = min(each.prediction.seconds for each in search.sets)
        return search.contenders(num_sets_to_time(fastest_s, train_iters, time.perf_counter() - start))

    contenders = agree_on_sets(group, run_together(group, lambda: select_sets() if is_first else []), search)
    crowded = any_rank(group, not fit_together(contenders, measured_cluster.device.memory_gib))
    trial_configs = [with_choice(config, contender.specs, contender.settings, topology) for contender in contenders]
    predicted_s = [contender.prediction.seconds for contender in contenders]
    stage_times = predict_stages(group, [each.prediction.choice for each in contenders], search.predictor)
    set_times = time_sets(trial_configs, predicted_s, stage_times, not crowded, time.perf_counter() - start)
    if contenders:
        contenders = search.calibrate(contenders, [set_time.seconds for set_time in set_times])
    trials = [
        dataclasses.replace(contender, trial_s=set_time.seconds, gains=set_time.gains)
        for contender, set_time in zip(contenders, set_times, strict=True)
    ]
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    if trials:
        result = search.choose(trials)
    else:  # nothing can gain
        plain = search.find_set([], {})
        result = AutoChoice(plain, plain, search)

    def describe() -> str:
        suggested = suggestions(search.predictor, result.chosen.prediction, free_settings)
        text = report(result, config.compression.max_loss_increase, suggested)
        return f"{text}\n  measured and chosen in {time.perf_counter() - start:.1f} s, of {result.considered} sets"

    log(run_together(group, lambda: describe() if is_first else ""))
    (chosen,) = agree_on_sets(group, [result.chosen], search)
    return with_choice(config, chosen.specs, chosen.settings, topology), result


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
        s_per_token: expected seconds of a step over its tokens; None if they were not known yet.
        step_tokens: tokens of those steps; None if they are not known.
    """

    loss: Mapping[str, Values] = field(default_factory=dict)
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
    checks = Values(choice.table("loss_checks", {}), config.checkpoint.source, _REMEDY)
    loss = {name: Values(checks.table(name), config.checkpoint.source, _REMEDY) for name in checks}
    return SavedChecks(
        loss,
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
    choice = Values(saved.common, location, _REMEDY).table(CHOICE, {})
    if not choice:
        return None
    values = Values(choice, location, _REMEDY)
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


def _describe_cluster(topology: Topology, env: LaunchEnvironment) -> Cluster:
    """Describe the nodes of the run and the memory of its devices, equally on all ranks. A collective call.

    Raises:
        UserError: on every rank, when nodes hold different numbers of ranks.
    """
    group, world_size = topology.control.pg, topology.layout.world_size
    nodes = [list(ranks) for _, ranks in groupby(gather_texts(group, env.node))]
    if len({len(ranks) for ranks in nodes}) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in nodes)
        raise UserError(f"--compress auto: nodes hold different numbers of ranks ({counts}); name the specs")
    if topology.device.type == "cuda":
        memory_bytes = float(torch.cuda.get_device_properties(topology.device).total_memory)
    else:  # this process's share of the machine's memory
        memory_bytes = memory_of_this_machine() / len(nodes[0])
    rows = gather_rows(topology.control, Ledger(), [memory_bytes / 2**30])
    return Cluster(gpus=world_size, gpus_per_node=len(nodes[0]), device=Device(memory_gib=min(rows)[0]))


def agree_on_sets(
    group: dist.ProcessGroup | None, selected: Sequence[CompressorSet], search: AutoSearch
) -> list[CompressorSet]:
    """Return the sets that rank 0 has selected. A collective call.

    All ranks predict by the same rates, but their libraries may round differently.
    """
    entries = take_from_rank_0(group, [(each.specs, dict(each.settings)) for each in selected])
    return run_together(group, lambda: [search.find_set(*entry) for entry in entries])


def with_choice(config: RunConfig, chosen_specs: list[str], settings: Settings, topology: Topology) -> RunConfig:
    """The resolved configuration with chosen specs beside those of the user, and chosen settings."""
    compression = config.compression.with_choice(config.compression.spec_texts, chosen_specs)
    parallel = dataclasses.replace(config.parallel, **settings)  # type: ignore[arg-type]
    config = dataclasses.replace(config, compression=compression, parallel=parallel)
    return config.resolve(topology.layout.world_size, cuda_available=torch.cuda.is_available())
