"""Flags of Megatron-LM, Megatron-DeepSpeed, Optimus-CC, Radius, EDGC and AQ-SGD that are not fields here (known.yaml).

Harmless flags are accepted, and reported once with the reason. Flags that would change the training are refused with
advice, unless given with their neutral value.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from megatron.config.translate.rules import SWITCH, VALUE, VALUES, KnownFlag

_ARITIES = {"switches": SWITCH, "values": VALUE, "lists": VALUES}


@cache
def read_known_flags() -> tuple[KnownFlag, ...]:
    """Read the flags of known.yaml, which describes its groups."""
    text = files(__package__).joinpath("known.yaml").read_text(encoding="utf-8")
    groups: list[dict[str, str]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # 4 ms, not 57
    flags = []
    for group in groups:
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
                flags.append(KnownFlag(name=name, arity=arity, refused=refused, neutral=values, **shared))
        reason = f"read only for {feature}, which is not offered"
        for name in group.get("options", "").split():
            flags.append(KnownFlag(name=name, arity=VALUE, refused=False, reason=reason))
    return tuple(flags)


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
