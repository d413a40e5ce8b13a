"""Built-in compressors. Each file registers its compressors, like the file of a plug-in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron.compression import (
    cast,
    chunked_topk,
    delta,
    edgc,
    fixpoint,
    float8,
    identity,
    lowrank_codec,
    parameter_server,
    powersgd,
    quantized_adam,
    topk,
)
from megatron.compression.registry import Registration, Registry

MODULES = (
    identity,
    fixpoint,
    float8,
    cast,
    lowrank_codec,
    delta,
    powersgd,
    edgc,
    topk,
    chunked_topk,
    quantized_adam,
    parameter_server,
)
"""Files with a function ``register(registry)``."""


def _builtin() -> Mapping[str, Registration]:
    registry = Registry()
    for module in MODULES:
        module.register(registry)
    return MappingProxyType({name: registry[name] for name in registry.names})


BUILTIN = _builtin()
"""Name -> compressor."""
