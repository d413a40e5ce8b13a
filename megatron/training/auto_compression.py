"""``--compress auto``: choice of compressors and settings by rates measured on this machine before the first step."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.config.memory import memory_of_this_machine
from megatron.config.run import RunConfig
from megatron.distributed.agreement import any_rank, gather_texts, run_together, take_from_rank_0
from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.topology import Topology
from megatron.planner.auto import NOTHING_TO_CHOOSE, AutoChoice, AutoSearch, fit_together
from megatron.planner.auto_report import report
from megatron.planner.candidates import candidate_specs, filter_by_budget, read_ladders
from megatron.planner.choice import check_planned, make_choice
from megatron.planner.cluster import Cluster, Device
from megatron.planner.compressor_search import CompressorSet
from megatron.planner.measure import fill_in_measured, measure_all
from megatron.planner.predict import Predictor
from megatron.planner.settings import list_free_settings
from megatron.planner.suggestions import suggestions
from megatron.planner.trials import num_sets_to_time
from megatron.training.planned_schedule import predict_stages
from megatron.training.saved_choice import with_choice
from megatron.training.schedule_choice import StageTimes
from megatron.training.trial_steps import SetTime

ChooseSet = Callable[[Sequence[SetTime]], int | None]
TimeSets = Callable[
    [Sequence[RunConfig], Sequence[float], Sequence[StageTimes | None], bool, float, ChooseSet], Sequence[SetTime]
]


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
    check_planned(config, world_size, "--compress auto", "name the specs")
    if config.compression.compress_adapt and (config.checkpoint.save is None or config.checkpoint.no_save_optim):
        raise UserError(
            "--compress-adapt: the run saves itself before it chooses again; give --save, and leave --no-save-optim out"
        )


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
    """Choose the compressors of ``--compress auto``, and settings that are free of harm. A collective call.

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
            times and those of their stages, whether to keep all engines at the same time, the seconds that the choice
            has taken so far, and a choice of the set whose loss is estimated. None if no step is left to take.
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
        lambda: AutoSearch(
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
    result = _try_sets(config, topology, search, contenders, time_sets, start)
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()

    def describe() -> str:
        suggested = suggestions(search.predictor, result.chosen.prediction, free_settings)
        text = report(result, config.compression.max_loss_increase, suggested)
        return f"{text}\n  measured and chosen in {time.perf_counter() - start:.1f} s, of {result.considered} sets"

    log(run_together(group, lambda: describe() if is_first else ""))
    (chosen,) = agree_on_sets(group, [result.chosen], search)
    result = dataclasses.replace(result, took_s=time.perf_counter() - start)
    return with_choice(config, chosen.specs, chosen.settings, topology), result


def _try_sets(
    config: RunConfig,
    topology: Topology,
    search: AutoSearch,
    contenders: Sequence[CompressorSet],
    time_sets: TimeSets,
    start: float,
) -> AutoChoice:
    """Time training steps with some sets, and choose among those that gain, within the budget as measured. A collective
    call.

    Args:
        contenders: the sets, the first without compressors; empty if nothing can gain.
        start: ``time.perf_counter()`` when the choice began.
    """
    if not contenders:
        plain = search.find_set([], {})
        return AutoChoice(plain, plain, search)
    group, memory_gib = topology.control.pg, search.predictor.cluster.device.memory_gib
    crowded = any_rank(group, not fit_together(contenders, memory_gib))
    trial_configs = [with_choice(config, contender.specs, contender.settings, topology) for contender in contenders]
    predicted_s = [contender.prediction.seconds for contender in contenders]
    stage_times = predict_stages(group, [each.prediction.choice for each in contenders], search.predictor)
    result: AutoChoice | None = None

    def choose_set(set_times: Sequence[SetTime]) -> int | None:
        nonlocal result
        calibrated = search.calibrate(contenders, [set_time.seconds for set_time in set_times])
        trials = [
            dataclasses.replace(each, trial_s=set_time.seconds, gains=set_time.gains)
            for each, set_time in zip(calibrated, set_times, strict=True)
        ]
        result = dataclasses.replace(search.choose(trials), traffic=set_times[0].traffic)
        return trials.index(result.chosen) if result.chosen.candidates else None

    spent_s = time.perf_counter() - start
    set_times = time_sets(trial_configs, predicted_s, stage_times, not crowded, spent_s, choose_set)
    estimate = next((set_time.estimate for set_time in set_times if set_time.estimate is not None), None)
    assert result is not None
    return result if estimate is None else search.ease(result, estimate)


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
