"""A recorder of computations on the CPU that has the rules of CUDA graphs.

It records operators with their tensors: a Python number keeps the value it had then, and the code
around them does not run again. As on a device, nothing is computed before the recording is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.inference.steps import Recording

ILLEGAL = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "_unique2")
"""Operators that wait for the device, or copy from the host's memory: CUDA refuses to record them."""


class _Taping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ILLEGAL:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **(kwargs or {}))
        if not any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
            self.calls.append((func, args, kwargs or {}, out))  # views stay views
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """Counts its recordings and replays."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        before = _copies(compute)
        with _Taping() as taping:
            result = compute()
        for tensor, content in before:  # nothing was computed
            tensor.copy_(content)
        result.fill_(torch.nan)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            taping.replay()

        return Recording(replay, result)


def _copies(compute: Callable[[], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The tensors that the computation holds on to, and their contents."""
    copies: list[Tensor] = []
    for cell in compute.__closure__ or ():
        cache = getattr(cell.cell_contents, "cache", None)
        if cache is not None:
            tree_map_only(Tensor, copies.append, vars(cache)["_tensors"])
    return [(tensor, tensor.clone()) for tensor in copies]
