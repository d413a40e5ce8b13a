"""Lossless conversion of plain Python values to JSON text and back.

JSON has no tuples, bytes, tensors, or keys other than strings; these are written as an object with a single key
that begins with "$". Decoding never runs code.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.storage import tensor_bytes
from megatron.kernels.dtypes import dtype_from_name, name_of_dtype

TUPLE, BYTES, TENSOR, DICT = "$tuple", "$bytes", "$tensor", "$dict"


def encode_plain(value: Any) -> bytes:
    """Encode None, bool, int, float, str, bytes, tensors, and lists, tuples and dicts of those as JSON.

    Raises:
        TypeError: for any other value; the message names its path.
    """
    return (json.dumps(_to_json(value, "state"), indent=1) + "\n").encode()


def decode_plain(data: bytes) -> Any:
    """Decode the output of ``encode_plain``.

    Raises:
        ValueError: when the text is not output of ``encode_plain``.
    """
    try:
        return _from_json(json.loads(data.decode()))
    except (AttributeError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _to_json(value: Any, location: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_to_json(item, f"{location}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    if isinstance(value, dict):
        plain_keys = all(type(key) is str and not key.startswith("$") for key in value)
        if plain_keys:
            return {key: _to_json(item, f"{location}[{key!r}]") for key, item in value.items()}
        pairs = [[_to_json(k, f"{location} key"), _to_json(v, f"{location}[{k!r}]")] for k, v in value.items()]
        return {DICT: pairs}
    if isinstance(value, bytes | bytearray):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        data = base64.b64encode(tensor_bytes(value)).decode()
        return {TENSOR: [name_of_dtype(value.dtype), list(value.shape), data]}
    raise TypeError(f"{location} is a {type(value).__name__}; a checkpoint holds plain types and tensors only")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key == TUPLE:
            return tuple(_from_json(item) for item in content)
        if key == DICT:
            return {_from_json(k): _from_json(v) for k, v in content}
        if key == BYTES:
            return base64.b64decode(content, validate=True)
        if key == TENSOR:
            dtype_name, shape, data = content
            raw, dtype = bytearray(base64.b64decode(data, validate=True)), dtype_from_name(dtype_name)
            return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)
    return {key: _from_json(item) for key, item in value.items()}
