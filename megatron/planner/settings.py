"""Settings that ``--compress auto`` may switch on; they change the results of a run by rounding at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from megatron.base.errors import UserError
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import can_compile_by_default
from megatron.parallel.pipeline.list_schedule import AUTO
from megatron.planner.choice import Choice
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.search import refusal_reason

Settings = Mapping[str, bool | str]
"""Values by the names of their fields in ``ParallelConfig``."""

FREE_SETTINGS: Settings = {"overlap_grad_reduce": True, "pipeline_schedule": AUTO, "moe_two_stage": "on"}
"""The settings."""

_CHOICE_FIELDS = {"overlap_grad_reduce": "overlap", "pipeline_schedule": "schedule", "moe_two_stage": "two_stage"}
"""Fields of ``Choice`` by the names of the settings."""


def apply_settings(choice: Choice, settings: Settings) -> Choice:
    """A choice with some settings."""
    changes = {_CHOICE_FIELDS[name]: value for name, value in settings.items()}
    return dataclasses.replace(choice, **changes)  # type: ignore[arg-type]


def flags_of(settings: Settings) -> list[str]:
    """Flags that switch settings on."""
    return [f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in settings.items()]


def drop_user_settings(settings: Settings, flag_fields: Collection[str]) -> dict[str, bool | str]:
    """Drop the settings that the user has set.

    Args:
        settings: the settings.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
    """
    return {name: value for name, value in settings.items() if f"parallel.{name}" not in flag_fields}


def list_free_settings(config: RunConfig, choice: Choice, flag_fields: Collection[str]) -> Settings:
    """List the settings that may be switched on in a run: those that concern it and that the user has not set.

    ``--pipeline-schedule auto`` may not if layers are compiled, which it does not allow.

    Args:
        config: resolved configuration.
        choice: the layout.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
    """
    training = config.training
    is_compiled = training.compile == "auto" and can_compile_by_default(training, config.parallel, config.model)
    is_plain = choice.pp > 1 and choice.chunks == 1 and choice.schedule == "1f1b" and choice.flush
    concerns_run = {
        "overlap_grad_reduce": choice.dp > 1 and not choice.overlaps_reduction,
        "pipeline_schedule": is_plain and not is_compiled,
        "moe_two_stage": choice.ep > 1 and choice.two_stage == "auto",
    }
    return drop_user_settings({name: value for name, value in FREE_SETTINGS.items() if concerns_run[name]}, flag_fields)


def without_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """A configuration with the defaults of some settings."""
    defaults = {field.name: field.default for field in dataclasses.fields(ParallelConfig) if field.name in settings}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **defaults))  # type: ignore[arg-type]


def find_settings(
    predictor: Predictor, predictions: Sequence[Prediction], free: Settings, least_gain: float
) -> Settings:
    """Find the settings that are predicted to save the greatest share of an iteration.

    Args:
        predictor: predictor of the model on the cluster.
        predictions: runs with different compressors; the share is the greatest over them.
        free: settings that may be switched on.
        least_gain: share that they must save; an additional setting must save a third of it in addition.

    Returns:
        The settings; empty if none save enough.
    """
    best_settings: Settings = {}
    best_gain = 2 / 3 * least_gain
    for count in range(1, len(free) + 1):  # fewer settings first
        for names in combinations(free, count):
            settings = {name: free[name] for name in names}
            gain = max(predict_gain(predictor, each, apply_settings(each.choice, settings)) for each in predictions)
            if gain >= best_gain + least_gain / 3:
                best_settings, best_gain = settings, gain
    return best_settings


def predict_gain(predictor: Predictor, prediction: Prediction, choice: Choice) -> float:
    """Predict the share of an iteration that another choice saves.

    Args:
        predictor: predictor of the model on the cluster.
        prediction: prediction of the run as it is.
        choice: the other choice.

    Returns:
        The share; 0 if training rejects the choice, or if it exceeds the memory of a device and the run does not.
    """
    if refusal_reason(predictor.config, choice) is not None:
        return 0.0
    try:
        changed = predictor.predict(choice)
    except UserError:
        return 0.0
    memory_limit = max(predictor.cluster.device.memory_gib * 2**30, prediction.memory_bytes)
    return 1.0 - changed.seconds / prediction.seconds if changed.memory_bytes <= memory_limit else 0.0
