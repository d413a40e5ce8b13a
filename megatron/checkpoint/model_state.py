"""A rank's parameters and optimizer state as layout-independent logical tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from megatron.checkpoint.logical import LogicalShard, boxes_of_flat_range, shard_of_local
from megatron.diloco.outer_sync import OuterSync
from megatron.optimizer.inner import state_names
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.param_shards import ParamShard
from megatron.parallel.tensor.shards import collect_specs

MODEL = "model."
OPTIMIZER = "optimizer."
MAIN = OPTIMIZER + "main."
"""The optimizer's fp32 main parameters of a model in lower precision."""
_ROUTING = re.compile(r"layers\.\d+\.mlp\.(router|mixing)\.")
_COPY_OF_MLP = re.compile(r"(layers\.\d+\.mlp\.)(experts\.\d+|shared)\.")


def model_tensors(stages: Sequence[nn.Module]) -> dict[str, LogicalShard]:
    """This rank's slices of the model's parameters, and the model's buffers, by logical name."""
    tensors = {}
    for stage in stages:
        specs = collect_specs(stage)
        for name, param in stage.named_parameters():
            logical_name, spec = specs[name]
            tensors[MODEL + logical_name] = shard_of_local(param.data, spec.offsets(), spec.logical_shape)
    return tensors | buffer_tensors(stages)


def buffer_tensors(stages: Sequence[nn.Module]) -> dict[str, LogicalShard]:
    """The model's buffers, by logical name; each rank that has a buffer holds all of it."""
    return {
        MODEL + name: shard_of_local(buffer, (0,) * buffer.dim(), tuple(buffer.shape))
        for stage in stages
        for name, buffer in stage.named_buffers()
    }


def map_to_dense_names(tensors: Mapping[str, LogicalShard]) -> dict[str, LogicalShard]:
    """Rename a mixture-of-experts model's tensors to a dense checkpoint's names, for upcycling.

    Routers are left out; all experts of a layer, and the shared MLP beside them, load the dense layer's MLP.
    """
    dense_tensors: dict[str, LogicalShard] = {}
    for name, shard in tensors.items():
        if _ROUTING.search(name):
            continue
        dense_name = _COPY_OF_MLP.sub(r"\1", name)
        earlier_boxes = dense_tensors[dense_name].boxes if dense_name in dense_tensors else []
        dense_tensors[dense_name] = LogicalShard(shard.global_shape, shard.dtype, [*earlier_boxes, *shard.boxes])
    return dense_tensors


def has_experts(names: Iterable[str]) -> bool:
    """Whether any of a model's tensors belongs to an expert."""
    return any(map(_COPY_OF_MLP.search, names))


def optimizer_tensors(optimizer: Optimizer) -> dict[str, LogicalShard]:
    """This rank's slices of the optimizer's state, by logical name."""
    tensors = {}
    for shard in optimizer.shards:
        for kind in state_names(optimizer.config, shard):
            state = optimizer.inner.state[shard.main][kind]
            tensors[f"{OPTIMIZER}{kind}.{shard.slot.logical_name}"] = _shard(shard, state)
    return tensors | (main_tensors(optimizer) if optimizer.separate_main else {})


DELAYED = OPTIMIZER + "delayed_"
"""Reduced gradients that the next step applies, and the memory of their delay correction."""


def delayed_tensors(
    optimizer: Optimizer, previous: Sequence[Tensor] | None, in_flight: bool
) -> dict[str, LogicalShard]:
    """This rank's slices of delayed gradients, and of the memory of their correction.

    Args:
        optimizer: the optimizer, with the reduced gradients.
        previous: ``DelayCorrection.previous``.
        in_flight: whether the next step applies these gradients.
    """
    columns = {"grad": [shard.grad for shard in optimizer.shards] if in_flight else [], "previous": previous or []}
    return {
        f"{DELAYED}{kind}.{shard.slot.logical_name}": _shard(shard, x)
        for kind, column in columns.items()
        for shard, x in zip(optimizer.shards, column, strict=bool(column))
    }


OUTER = OPTIMIZER + "outer_"
"""State of the outer optimizer: the outer parameters, their momentum, and a mean that is not applied yet."""


def outer_tensors(outer: OuterSync | None) -> dict[str, LogicalShard]:
    """This rank's slices of the outer optimizer's state."""
    if outer is None:
        return {}
    shards = outer.optimizer.shards
    tensors = {
        f"{OUTER}{kind}.{shard.slot.logical_name}": _shard(shard, x)
        for kind, state_tensors in outer.outer.tensors().items()
        for shard, x in zip(shards, state_tensors, strict=True)
    }
    pending_means = {
        f"{OUTER}mean.{shards[n].slot.logical_name}": _shard(shards[n], x) for n, x in outer.means().items()
    }
    other_means = outer.untrained_means().items()
    pending_means |= {
        f"{OUTER}mean.{name}": shard_of_local(x, (0,) * x.dim(), tuple(x.shape)) for name, x in other_means
    }
    return tensors | pending_means


def main_tensors(optimizer: Optimizer) -> dict[str, LogicalShard]:
    """This rank's slices of the main parameters that the optimizer updates."""
    return {MAIN + shard.slot.logical_name: _shard(shard, shard.main) for shard in optimizer.shards}


def _shard(shard: ParamShard, flat: Tensor) -> LogicalShard:
    spec = shard.slot.spec
    boxes = boxes_of_flat_range(
        tuple(shard.slot.param.shape), spec.offsets(), spec.logical_shape, flat, shard.start, shard.stop
    )
    return LogicalShard(spec.logical_shape, flat.dtype, boxes)
