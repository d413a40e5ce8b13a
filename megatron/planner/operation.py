"""Costs and results of single operations, each computed once for all arguments of the same form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")

_FREE = frozenset(
    {"detach", "alias", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "sources"}
)
"""Operations that neither read nor write (``sources`` checks our kernels once); views are detected by their storage."""


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of (r, in) rows times an (in, out) matrix per group, or of (out, r) times (r, in); groups are disjoint."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


@cache
def _flop_formula(packet: Any) -> Any:
    """Formula of an operation's FLOPs; None if they are not counted. In-place operations have the formula of their
    out-of-place variants: addmm_ that of addmm."""
    name = packet.__name__
    if name == "_grouped_mm":  # torch does not count it
        return _grouped_flops
    return flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), packet) if name.endswith("_") else packet)


class _TensorForm(NamedTuple):
    """A tensor without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _ListForm(NamedTuple):
    """A list or a tuple of forms."""

    kind: type
    entries: tuple[Any, ...]


class _Number(NamedTuple):
    """A number with its type, because 1, 1.0 and True are equal."""

    kind: type
    value: float


def _describe(value: Any) -> Any:
    """Describe an argument or a result by a hashable value."""
    if isinstance(value, Tensor):
        return _TensorForm(value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (bool, int, float)):
        return _Number(type(value), value)
    if isinstance(value, (list, tuple)):
        return _ListForm(list if isinstance(value, list) else tuple, tuple(map(_describe, value)))
    return value


def _make_value(form: Any) -> Any:
    """Make a new value of a form."""
    if isinstance(form, _TensorForm):
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)
    if isinstance(form, _Number):
        return form.value
    if isinstance(form, _ListForm):
        return form.kind(map(_make_value, form.entries))
    return form


def _tensors(*values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Cost:
    """Cost of an operation.

    Args:
        flops: FLOPs of a matrix product.
        nbytes: bytes of all arguments and results.
    """

    flops: float
    nbytes: int


@dataclass(frozen=True)
class _Outcome:
    """Cost of an operation, and the form of its result; ``is_new`` if that consists of new meta tensors."""

    cost: Cost | None
    is_new: bool
    result: Any


def _cost_of(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Cost | None:
    """Cost of an operation that has run; None if it neither reads nor writes."""
    packet = func._overloadpacket
    if func.is_view or packet.__name__ in _FREE:
        return None
    formula = _flop_formula(packet)
    flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
    return Cost(flops, sum(x.nbytes for x in _tensors(args, kwargs, out)))


@lru_cache(maxsize=1 << 16)
def _run_once(func: Any, args_form: Any, kwargs_form: Any) -> _Outcome | None:
    """Run an operation on meta tensors of the given forms; None if another tensor is among the arguments."""
    args, kwargs = _make_value(args_form), dict(_make_value(kwargs_form))
    if any(x.device != META for x in _tensors(args, kwargs)):
        return None
    out = func(*args, **kwargs)
    storages = [x.untyped_storage()._cdata for x in _tensors(out)]
    input_storages = {x.untyped_storage()._cdata for x in _tensors(args, kwargs)}
    form = _describe(out)
    is_new = (
        not func._schema.is_mutable
        and len(set(storages)) == len(storages)
        and input_storages.isdisjoint(storages)
        and all(x.device == META and x.storage_offset() == 0 for x in _tensors(out))
        and all(
            x.untyped_storage().nbytes() == copy.untyped_storage().nbytes()
            for x, copy in zip(_tensors(out), _tensors(_make_value(form)), strict=True)
        )
    )
    return _Outcome(_cost_of(func, args, kwargs, out), is_new, form)


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Cost | None]:
    """Run an operation; return its result and its cost, which is None if it neither reads nor writes.

    Many operations on meta tensors are decomposed in Python, which takes a millisecond. Operations that return new meta
    tensors are therefore run only once for each form of their arguments.
    """
    outcome = None if func.is_view else _run_once(func, _describe(args), _describe(tuple(kwargs.items())))
    if outcome is None:
        out = func(*args, **kwargs)
        return out, _cost_of(func, args, kwargs, out)
    return _make_value(outcome.result) if outcome.is_new else func(*args, **kwargs), outcome.cost
