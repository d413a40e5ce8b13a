"""Checks of the values that compressors return, since plug-ins come from anyone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Payload, Request, RoundCompressor
from megatron.compression.options import CompressorFault

NOT_DECODED = "finite numbers decode to non-finite numbers"
NOT_SUMMED = "finite numbers have a sum that is not finite"


def check_request(value: Any, compressor: RoundCompressor) -> Request:
    """Check a value that ``rounds`` yields, and return it.

    Raises:
        CompressorFault: when it is no request.
    """
    if isinstance(value, Request):
        return value
    raise CompressorFault(f"{_name(_innermost(compressor))}.rounds yields a {_name(value)}; yield Request(tensor)")


def check_aggregate(value: Any, x: Tensor, compressor: RoundCompressor) -> Aggregate:
    """Check the result of ``rounds`` for a tensor, and return it.

    Raises:
        CompressorFault: when it is no aggregate, or its tensors have another shape.
    """
    if not isinstance(value, Aggregate):
        raise CompressorFault(
            f"{_name(_innermost(compressor))}.rounds returns a {_name(value)}; return Aggregate(total, local)"
        )
    for field, tensor in (("total", value.total), ("local", value.local)):
        if isinstance(tensor, Tensor) and tensor.shape != x.shape:
            shapes = f"{tuple(tensor.shape)} for {tuple(x.shape)}"
            raise CompressorFault(f"{_name(_innermost(compressor))}.rounds returns an Aggregate.{field} of {shapes}")
    return value


def check_fit(message: Payload, room: Payload) -> None:
    """Check that a message fills the buffer that its receiver allocates.

    Raises:
        CompressorFault: when their shapes or dtypes differ, or when one is not contiguous or has a wrong ``nbytes``.
    """
    actual, expected = (f"{tuple(payload.wire.shape)} {payload.wire.dtype}" for payload in (message, room))
    if actual != expected:
        raise CompressorFault(f"encode makes a message of {actual}, but empty_payload has room for {expected}")
    for name, payload in (("encode", message), ("empty_payload", room)):
        if not payload.wire.is_contiguous():
            raise CompressorFault(f"the message of {name} is not contiguous")
        count = payload.wire.nbytes
        if payload.nbytes != count:
            raise CompressorFault(f"nbytes of {name} is {payload.nbytes}, and the message has {count} bytes")


def check_finite(x: Tensor, fault: str) -> None:
    """Check that a result of finite numbers is finite.

    Raises:
        CompressorFault: with the fault, when it is not.
    """
    if not bool(torch.isfinite(x).all()):
        raise CompressorFault(fault)


def _innermost(compressor: RoundCompressor) -> Any:
    """The compressor itself, without error feedback and other wrappers."""
    inner: Any = compressor
    while isinstance(getattr(inner, "inner", None), RoundCompressor):
        inner = inner.inner
    return inner


def _name(value: Any) -> str:
    return type(value).__name__
