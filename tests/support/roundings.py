"""Notes where a computation of float64 numbers leaves float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.training.step import evaluation_step, take_batches, train_step
from tests.support.tiny import merge, tiny_batches, tiny_engines

_PACKAGE = str(Path(__file__).parents[2] / "megatron")


class Roundings(TorchDispatchMode):
    """Notes, in ``places``, the operations that write narrower floating-point numbers than float64, forward and
    backward, on this thread: "file:line operation".

    Whole numbers are exact in float32: loss masks, counts, Adam's number of steps. They and infinities may be narrow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.__name__.split(".")[0].endswith(("empty", "empty_like", "empty_strided", "new_empty_strided")):
            written = _written(func, args, kwargs, result)
            if any(x.is_floating_point() and x.dtype != torch.float64 and not _is_integral(x) for x in written):
                self.places.add(f"{_caller()} {func}")
        return result


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Iterator[Tensor]:
    """The tensors that an operation has made or changed; no views."""
    schema = func._schema
    arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    changed = [arguments.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    results = result if isinstance(result, tuple) else (result,)
    copied = func is torch.ops.aten.lift_fresh.default  # ``torch.tensor`` of Python's numbers
    fresh = [x for x, r in zip(results, schema.returns, strict=False) if copied or r.alias_info is None]
    yield from (x for x in tree_leaves([changed, fresh]) if isinstance(x, Tensor))


def _is_integral(x: Tensor) -> bool:
    x = x.detach()
    return bool((x.isinf() | (x == x.round())).all())


def _caller() -> str:
    """The innermost line of the package that is being executed."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def roundings(changes: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The places where two training steps of a tiny run under ``--fp64``, and an evaluation, leave float64. No number
    of tokens, or of those that count, is a power of two. A collective call when there is a process group."""
    sizes: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "seq_length": 6, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        "training": {"global_batch_size": 3},
        "data": {"eod_mask_loss": True},
        "optimizer": {"clip_grad": 0.01},
    }
    engines = tiny_engines(merge(sizes, changes, {"precision": {"fp64": True}}))
    config, topology = engines.config, engines.topology
    count = config.training.global_batch_size // (config.training.micro_batch_size * topology.layout.dp)
    batches = tiny_batches(config, topology, masked=True)
    steps = [take_batches(batches, count, topology.device) for _ in range(3)]
    with Roundings() as recorder:
        for number in range(2):
            assert not train_step(engines, steps[number], number, 1e-3, 0.1).skipped_iterations
        evaluation_step(engines, steps[2])
    # Buckets of distances are whole numbers, which must equal those of other implementations: see there.
    return {line for line in recorder.places if not line.startswith("models/disentangled.py")}
