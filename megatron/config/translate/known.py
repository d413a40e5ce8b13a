"""Flags of Megatron-LM, Megatron-DeepSpeed, Optimus-CC, Radius, EDGC and AQ-SGD that are not fields here (known.yaml).

Harmless flags are accepted, and reported once with the reason. Flags that would change the training are refused with
advice, unless given with their neutral value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from megatron.config.translate.rules import SWITCH, VALUE, VALUES, KnownFlag

_ARITIES = {"switches": SWITCH, "values": VALUE, "lists": VALUES}


def _flags_of(group: Mapping[str, str]) -> Iterator[KnownFlag]:
    """The flags of a group of known.yaml, which describes groups."""
    refused, feature = "no_effect" not in group, group.get("not_offered", "")
    if feature:
        reason = f"{feature}: not offered; {group['instead']}"
    elif "renamed" in group:
        reason = f"here it is {group['renamed']}"
    else:
        reason = group["refused" if refused else "no_effect"]
    shared: dict[str, Any] = {"reason": reason, "program": group.get("program", ""), "feature": feature}
    for kind, arity in _ARITIES.items():
        for word in group.get(kind, "").split():
            name, _, neutral = word.partition("=")
            values = tuple(filter(None, neutral.split("|")))
            yield KnownFlag(name=name, arity=arity, refused=refused, neutral=values, **shared)
    for name in group.get("options", "").split():
        yield KnownFlag(name=name, arity=VALUE, refused=False, reason=f"read only for {feature}, which is not offered")


@cache
def read_known_flags() -> tuple[KnownFlag, ...]:
    """Read the flags of known.yaml."""
    text = files(__package__).joinpath("known.yaml").read_text(encoding="utf-8")
    groups = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # 4 ms instead of 57
    return tuple(flag for group in groups for flag in _flags_of(group))


RETIRED_FIELDS: dict[str, object] = {
    "training.use_flash_attn": False,
    "training.empty_unused_memory_level": 0,
    "checkpoint.no_save_rng": False,
    "checkpoint.no_load_rng": False,
    "checkpoint.universal_checkpoint": False,
    "parallel.gradient_accumulation_fusion": True,
    "logging.log_memory_to_tensorboard": False,
}
"""Fields that earlier versions saved in their configurations, and their defaults. None ever had an effect."""
