"""Names of dtypes, as files and messages hold them."""

from __future__ import annotations

import torch


def dtype_from_name(name: str) -> torch.dtype:
    """The torch dtype called ``name``, as in "float32".

    Raises:
        ValueError: when there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no tensor type")
    return dtype


def name_of_dtype(dtype: torch.dtype) -> str:
    """Name of a dtype without torch's prefix, as in "float32"."""
    return str(dtype).removeprefix("torch.")
