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


_registry = Registry()
for _module in MODULES:
    _module.register(_registry)

BUILTIN: Mapping[str, Registration] = MappingProxyType({name: _registry[name] for name in _registry.names})
"""Name -> compressor."""
