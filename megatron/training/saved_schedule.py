"""The schedule of ``--pipeline-schedule auto`` in checkpoints: a resumed run keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.value_type import ValueType
from megatron.base.values import Values
from megatron.compression.points import Point
from megatron.compression.spec import point_name
from megatron.distributed.agreement import run_together
from megatron.parallel.pipeline.list_schedule import AUTO, MeasuredPipeline
from megatron.training.assembly import Engines
from megatron.training.saved_run import SavedRun
from megatron.training.schedule_choice import (
    COLUMNS,
    ScheduleChoice,
    StageTimes,
    list_times,
    make_pipeline,
    use_schedule,
)

SCHEDULE = "pipeline_schedule"
"""Name of the schedule among the values of a checkpoint."""
_REMEDY = "load another checkpoint, or name a schedule with --pipeline-schedule"
_SECONDS = ValueType(element=float, minimum=0.0)


def describe_schedule(engines: Engines) -> dict[str, Any]:
    """Describe the chosen schedule for checkpoints: the measured times of the stages, the conditions under which they
    were measured, and the hash of the order. Empty before the choice, and with other schedules."""
    measured = engines.pipeline.measured
    if measured is None or not measured.is_final:
        return {}
    return {
        "times": list_times(measured.pipeline),
        "with_lists": measured.with_lists,
        "conditions": _list_conditions(engines),
        "digest": engines.pipeline.get_timetable(AUTO, _count_micro_batches(engines)).digest,
    }


def restore_schedule(engines: Engines, saved: SavedRun, log: Callable[[str], None]) -> None:
    """Use the schedule that the checkpoint's run has chosen, if its times hold for this run. A collective call.

    Args:
        engines: this rank's engines, with the compressors of their first step.
        saved: the checkpoint.
        log: prints lines for the user.

    Raises:
        UserError: on every rank, when the checkpoint's values are damaged, or ranks order the passes differently.
    """
    if not ScheduleChoice.is_needed(engines) or not saved.common[SCHEDULE]:
        return
    config, limits = engines.config, engines.pipeline.limits
    values = Values(saved.common[SCHEDULE], f"{config.checkpoint.source}, {SCHEDULE}", _REMEDY)
    control, micro_batches = engines.topology.control.pg, _count_micro_batches(engines)
    conditions = _list_conditions(engines)
    saved_conditions = run_together(control, lambda: dict(values.table("conditions")))
    changed = [name for name, value in conditions.items() if saved_conditions.get(name) != value]
    if changed:
        log(f"pipeline schedule: measured again, since {', '.join(changed)} differs from the checkpoint's run")
        return
    times = run_together(control, lambda: _read_times(values, engines.topology.layout.pp))
    schedule = run_together(
        control, lambda: MeasuredPipeline(make_pipeline(times, limits), values.flag("with_lists"), is_final=True)
    )
    use_schedule(engines, schedule, micro_batches)
    if engines.pipeline.get_timetable(AUTO, micro_batches).digest != values.get("digest"):
        log("pipeline schedule: measured again, since this version orders the passes differently")
        engines.pipeline.measured = None
        return
    log(f"pipeline schedule: keeps that of the checkpoint's run: {schedule.candidates(micro_batches)[0]}")


def _count_micro_batches(engines: Engines) -> int:
    """Number of micro-batches in a full batch."""
    training = engines.config.training
    return training.global_batch_size // (training.micro_batch_size * engines.topology.dp.size)


def _list_conditions(engines: Engines) -> dict[str, Any]:
    """What the measured times, and the choice by them, depend on: JSON values, by their names for the user."""
    config, topology, plan = engines.config, engines.topology, engines.plan
    layout, device = topology.layout, topology.device
    limits = engines.pipeline.limits
    specs = {point_name(text): text for text in config.compression.spec_texts}
    specs |= {point.value: text for point, text in plan.substitutes.items()}
    return {
        "the layout": [layout.tp, layout.pp, layout.dp, layout.ep],
        "the device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "--micro-batch-size": config.training.micro_batch_size,
        "--global-batch-size": config.training.global_batch_size,
        "--seq-length": config.model.seq_length,
        "--pipeline-max-in-flight": limits.in_flight,
        "--pipeline-max-weight-records": limits.weight_records,
        **{
            f"--compress {point.value}": "" if plan.is_turned_off(point) else specs.get(point.value, "")
            for point in (Point.PP_FWD, Point.PP_BWD)
        },
    }


def _read_times(values: Values, stages: int) -> StageTimes:
    """Read the times of the stages.

    Raises:
        UserError: when they are damaged.
    """
    rows = values.listed("times")
    if len(rows) != stages or not all(isinstance(row, list) and len(row) == COLUMNS for row in rows):
        raise values.wrong(f"times: expected {COLUMNS} numbers of each of {stages} stages")
    try:
        return [[float(_SECONDS.from_json(seconds, "times")) for seconds in row] for row in rows]
    except UserError as error:
        raise values.wrong(str(error)) from None
