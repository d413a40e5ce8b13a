"""The schedule of ``--pipeline-schedule auto`` in checkpoints: a resumed run keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.fields import field_options
from megatron.base.value_type import ValueType
from megatron.base.values import Values
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.spec import expand_spec, point_name
from megatron.distributed.agreement import gather_texts, run_together
from megatron.parallel.pipeline.list_schedule import AUTO, MeasuredPipeline
from megatron.training.assembly import Engines
from megatron.training.planned_schedule import describe_cluster
from megatron.training.saved_run import SavedRun
from megatron.training.schedule_choice import (
    COLUMNS,
    MAX_SECONDS,
    ScheduleChoice,
    list_times,
    make_pipeline,
    use_schedule,
)
from megatron.training.step import count_micro_batches

SCHEDULE = "pipeline_schedule"
"""Name of the schedule among the values of a checkpoint."""
_REMEDY = "load another checkpoint, or name a schedule with --pipeline-schedule"
_SECONDS = ValueType(element=float, minimum=0.0, maximum=MAX_SECONDS)
_NOT_COMPARED = (
    "pipeline_schedule", "pipeline_cluster", "local_rank", "distributed_timeout_minutes", "peer_timeout_seconds"
)  # fmt: skip
"""Fields of the compared sections that change no times, or that are compared by themselves."""
_POINTS_IN_PASSES = (Point.PP_FWD, Point.PP_BWD, Point.TP_FWD, Point.TP_BWD, *EXPERT_POINTS)


def gather_devices(engines: Engines) -> list[str]:
    """Gather the names of all ranks' devices; of ``--pipeline-schedule auto`` only. A collective call."""
    if engines.config.parallel.pipeline_schedule != AUTO:
        return []
    device = engines.topology.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return gather_texts(engines.topology.control.pg, name)


def describe_schedule(engines: Engines, devices: Sequence[str]) -> dict[str, Any]:
    """Describe the chosen schedule for checkpoints: the measured or predicted times of the stages, the conditions under
    which they hold, and the hash of the order. Empty before the choice, and with other schedules.

    Args:
        engines: this rank's engines.
        devices: all ranks' devices, of ``gather_devices``.
    """
    measured = engines.pipeline.measured
    if measured is None or not measured.is_final:
        return {}
    return {
        "times": list_times(measured.pipeline),
        "with_lists": measured.with_lists,
        "conditions": _list_conditions(engines, devices, measured.cluster),
        "digest": engines.pipeline.get_timetable(AUTO, count_micro_batches(engines)).digest,
    }


def restore_schedule(engines: Engines, saved: SavedRun, chooses_again: bool, log: Callable[[str], None]) -> None:
    """Use the schedule that the checkpoint's run has chosen, if its times hold for this run. A collective call.

    Args:
        engines: this rank's engines, with the compressors of their first step.
        saved: the checkpoint.
        chooses_again: whether ``--compress auto`` has chosen again, which it may do because the links have changed.
        log: prints lines for the user.

    Raises:
        UserError: on every rank, when the checkpoint's values are damaged, or ranks order the passes differently.
    """
    if not ScheduleChoice.is_needed(engines):
        return
    control, location = engines.topology.control.pg, f"{engines.config.checkpoint.source}, {SCHEDULE}"
    values = run_together(control, lambda: Values(saved.common, location, _REMEDY).table(SCHEDULE, {}))
    if not values:
        return
    reason, micro_batches = "", count_micro_batches(engines)
    cluster = run_together(control, lambda: describe_cluster(engines.config, engines.topology.layout.world_size))
    conditions = _list_conditions(engines, gather_devices(engines), cluster)
    saved_conditions = run_together(control, lambda: values.table("conditions"))
    changed = [name for name, value in conditions.items() if saved_conditions.get(name) != value]
    if chooses_again:
        reason = "--compress auto has chosen again"
    elif changed:
        reason = f"{', '.join(changed)}: other values than in the checkpoint's run"
    else:
        schedule, digest = run_together(control, lambda: _read_schedule(values, engines, cluster))
        if use_schedule(engines, schedule, micro_batches, digest):
            order = schedule.candidates(micro_batches)[0]
            log(f"pipeline schedule: keeps that of the checkpoint's run; with {micro_batches} micro-batches, {order}")
            return
        reason = "the saved times give another order in this version"
    again = "measured" if cluster is None else "planned"
    log(f"pipeline schedule: {again} again, since {reason}")


def _list_conditions(engines: Engines, devices: Sequence[str], cluster: Mapping[str, Any] | None) -> dict[str, Any]:
    """List what the times, and the choice by them, depend on: JSON values by flag, equal on all ranks."""
    config, plan = engines.config, engines.plan
    specs = {point_name(spec): spec for text in config.compression.spec_texts for spec in expand_spec(text)}
    specs |= {point.value: text for point, text in plan.substitutes.items()}
    sections = {"parallel": config.parallel, "precision": config.precision, "recompute": config.recompute}
    flags = {
        f"--{field.flag}": getattr(values, field.name)
        for section, values in sections.items()
        for field in field_options(section, type(values))
        if field.name not in _NOT_COMPARED
    }
    return {
        "the number of ranks": engines.topology.layout.world_size,
        "the devices": list(devices) if len(set(devices)) > 1 else devices[0],
        "--pipeline-cluster": cluster,
        "--micro-batch-size": config.training.micro_batch_size,
        "--global-batch-size": config.training.global_batch_size,
        "--seq-length": config.model.seq_length,
        "--decoder-seq-length": config.model.decoder_seq_length,
        **flags,
        **{
            f"--compress {point.value}": "" if plan.is_turned_off(point) else specs.get(point.value, "")
            for point in _POINTS_IN_PASSES
        },
    }


def _read_schedule(values: Values, engines: Engines, cluster: Mapping[str, Any] | None) -> tuple[MeasuredPipeline, str]:
    """Read a pipeline's times, and the hash of its order.

    Raises:
        UserError: when they are damaged.
    """
    rows, stages = values.listed("times"), engines.topology.layout.pp
    if len(rows) != stages or not all(isinstance(row, list) and len(row) == COLUMNS for row in rows):
        raise values.wrong(f"times: expected {COLUMNS} numbers of each of {stages} stages")
    try:
        times = [[float(_SECONDS.from_json(seconds, "times")) for seconds in row] for row in rows]
    except UserError as error:
        raise values.wrong(str(error)) from None
    pipeline = make_pipeline(times, engines.pipeline.limits)
    schedule = MeasuredPipeline(pipeline, values.flag("with_lists"), is_final=True, cluster=cluster)
    return schedule, values.text("digest")
