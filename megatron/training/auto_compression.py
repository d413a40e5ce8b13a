"""``--compress auto``: measures this machine and its links before the first step, and chooses the compressors."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.compression.plugins import build_registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.config.memory import memory_of_this_machine
from megatron.config.run import RunConfig
from megatron.distributed.agreement import gather_texts, together
from megatron.distributed.layout import Layout
from megatron.distributed.observer import Finding, Observer
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.topology import Topology
from megatron.planner.auto import NOTHING_TO_CHOOSE, AutoChoice, Ladders, candidate_specs, choose, read_ladders, report
from megatron.planner.choice import NOT_PLANNED, choice_of, plannable
from megatron.planner.cluster import Cluster, Device
from megatron.planner.measure import described, measure_all
from megatron.planner.predict import Predictor
from megatron.training.saved_run import SavedRun

_SETTLING_STEPS, _CHECKED_STEPS = 2, 5
"""Steps whose times are not compared with the prediction, and steps whose median time is."""

CHOICE = "compression_choice"
"""Name of the choice in a checkpoint."""

_REMEDY = "load another checkpoint, or name the specs"

_STAND_IN: Literal["zb-h1"] = "zb-h1"
"""Schedule that is predicted in place of ``--pipeline-schedule auto``, which is rarely slower."""


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
        plannable(_planned(config), world_size)
    except UserError as error:
        raise UserError(f"--compress auto: cannot predict this run ({error}); name the specs") from error


def with_chosen_compressors(
    config: RunConfig,
    topology: Topology,
    env: LaunchEnvironment,
    vocab_size: int,
    saved: SavedRun | None,
    log: Callable[[str], None],
) -> tuple[RunConfig, AutoChoice | None]:
    """Choose the compressors of ``--compress auto``, or keep those of the checkpoint. A collective call.

    Args:
        config: resolved configuration.
        topology: the ranks.
        env: environment of this process.
        vocab_size: entries of the vocabulary.
        saved: the checkpoint that the run begins with, if any.
        log: prints lines for the user, on one rank.

    Returns:
        The configuration with the chosen specs, the same on all ranks; and the choice, unless it was the checkpoint's
        or the user's.

    Raises:
        UserError: on every rank, when the run cannot be predicted.
    """
    if not config.compression.is_auto:
        return config, None
    group, user_specs = topology.control.pg, config.compression.spec_texts
    kept = None
    if saved is not None and not config.checkpoint.finetune:
        kept = together(group, lambda: _kept_specs(config, topology, saved, log))
    if kept is not None:
        log(f"--compress auto: keeps the choice of the checkpoint's run: {' '.join(kept) or 'nothing'}")
        return _with_specs(config, [*user_specs, *kept], topology), None
    planned, world_size = _planned(config), topology.layout.world_size
    memory_gib = _memory_gib(topology.device, env.ranks_here)
    cluster = Cluster(gpus=world_size, gpus_per_node=env.ranks_here, device=Device(memory_gib=memory_gib))
    ladders = read_ladders(planned, choice_of(planned, world_size), cluster)
    if not ladders:
        log(NOTHING_TO_CHOOSE)
        return config, None
    start, on_cpu = time.perf_counter(), topology.device.type == "cpu"
    with torch.random.fork_rng(devices=[] if on_cpu else [topology.device]):
        result = together(group, lambda: _choose(planned, topology, cluster, vocab_size, ladders))
    if not on_cpu:
        torch.cuda.empty_cache()
    log(report(result, config.compression.max_loss_increase))
    log(f"  measured and chosen in {time.perf_counter() - start:.1f} s, of {result.considered} sets")
    # All ranks choose by the same numbers, but their libraries may round differently.
    chosen = gather_texts(group, "\n".join(result.chosen.choice.specs[len(user_specs) :]))[0].splitlines()
    return _with_specs(config, [*user_specs, *chosen], topology), result


class PredictionCheck(Observer):
    """Reports how long an iteration takes beside what was predicted, once.

    Args:
        choice: the choice with its prediction.
        plan: the compressors of the run; steps of their warm-ups are not measured.
    """

    def __init__(self, choice: AutoChoice, plan: CompressionPlan) -> None:
        self._predicted_s = choice.chosen.seconds
        self._warmup_iters = max((spec.activation.warmup_iters for spec in plan.specs.values()), default=0)
        self._last = (-1, 0.0)
        self._seconds: list[float] = []
        self._has_reported = False

    def begin_step(self, iteration: int) -> None:
        now = time.perf_counter()
        last_iteration, start = self._last
        if self._warmup_iters <= last_iteration == iteration - 1:
            self._seconds.append(now - start)
        self._last = (iteration, now)

    def findings(self, iteration: int) -> Iterable[Finding]:
        if self._has_reported or len(self._seconds) < _SETTLING_STEPS + _CHECKED_STEPS:
            return
        self._has_reported = True
        measured_s = statistics.median(self._seconds[_SETTLING_STEPS:])
        values = {"predicted_s": self._predicted_s, "measured_s": measured_s}
        line = f"--compress auto: an iteration takes {measured_s:.3g} s, {self._predicted_s:.3g} s were predicted"
        yield Finding("auto_compression", values, line)


def describe_choice(config: RunConfig, layout: Layout) -> dict[str, list[str] | list[int]]:
    """The chosen specs, with the layout that they were chosen for, as checkpoints hold them; empty without a choice."""
    if not config.compression.is_auto:
        return {}
    return {"specs": config.compression.spec_texts, "layout": _sizes(layout)}


def _sizes(layout: Layout) -> list[int]:
    return [layout.tp, layout.pp, layout.dp, layout.ep]


def _kept_specs(config: RunConfig, topology: Topology, saved: SavedRun, log: Callable[[str], None]) -> list[str] | None:
    """Specs that the checkpoint's run chose, without those at points with a spec of the user; None to choose again.

    Raises:
        UserError: when the checkpoint's values are damaged.
    """
    location = f"{config.checkpoint.source}, the choice of --compress auto"
    choice = Values(saved.common, location, _REMEDY).table(CHOICE, {})
    if not choice:
        return None
    values = Values(choice, location, _REMEDY)
    specs, sizes = values.texts("specs"), values.integers("layout")
    try:
        read_specs(specs, build_registry(config.compression.compress_module), RunLength(config.training.planned_iters))
    except UserError as error:
        raise values.wrong(str(error)) from error
    if sizes != _sizes(topology.layout):
        log(f"--compress auto: the layout has changed since the checkpoint, which had {' '.join(specs) or 'nothing'}")
        return None
    user_points = {spec.partition("=")[0].strip().lower() for spec in config.compression.spec_texts}
    return [spec for spec in specs if spec.partition("=")[0].strip().lower() not in user_points]


def _choose(planned: RunConfig, topology: Topology, cluster: Cluster, vocab_size: int, ladders: Ladders) -> AutoChoice:
    choice = choice_of(planned, topology.layout.world_size)
    specs = [*choice.specs, *candidate_specs(ladders)]
    values = measure_all(planned, vocab_size, specs, topology, cluster.gpus_per_node)
    predictor = Predictor(planned, described(values, cluster), vocab_size)
    return choose(predictor, choice, ladders, planned.compression.max_loss_increase, cluster.device.memory_gib)


def _planned(config: RunConfig) -> RunConfig:
    """The configuration as it is predicted."""
    if config.parallel.pipeline_schedule != "auto":
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, pipeline_schedule=_STAND_IN))


def _memory_gib(device: torch.device, ranks_here: int) -> float:
    """Memory of a device; on CPUs, this process's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return memory_of_this_machine() / ranks_here / 2**30


def _with_specs(config: RunConfig, specs: list[str], topology: Topology) -> RunConfig:
    compression = dataclasses.replace(config.compression, compress=["auto", *specs])
    config = dataclasses.replace(config, compression=compression)
    return config.resolve(topology.layout.world_size, cuda_available=torch.cuda.is_available())
