"""Matrix products: native fp32 kernels on processors where they are faster than torch's, else torch's.

The summation order in native products depends only on the inner dimension, not on the other sizes, the number of
threads, or the other products of the same call.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels import native, reference

CHOICE = "MEGATRON_CC_PRODUCTS"
"""Environment variable: ``own`` forces native products and ``torch`` torch's products, on any processor."""


@functools.cache
def own_products() -> bool:
    """Whether fp32 CPU tensors use native products.

    Raises:
        RuntimeError: when ``MEGATRON_CC_PRODUCTS`` is invalid, or asks for native products that are not available.
    """
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", "own", "torch"):
        raise RuntimeError(f"{CHOICE}={choice}: the choices are own and torch")
    if choice == "torch":
        return False
    why = native.problem_on("cpu")
    if why is None and not native.operators().multiplies():
        why = "this processor has no AVX2, or MCC_ISA asks for less"
    if choice == "own" and why is not None:
        raise RuntimeError(f"{CHOICE}=own, but {why}")
    if choice == "own":
        return True
    # The speed of libraries other than MKL is unknown.
    return why is None and torch.backends.mkl.is_available() and bool(native.operators().outdoes_mkl())


@functools.cache
def smallest_product() -> int:
    """Smallest dimension at which native products on this processor outweigh the packing of their factors."""
    return int(native.operators().smallest_product())


def multiplies(a: Tensor, b: Tensor, groups: int = 1) -> bool:
    """Whether native products support these factors of a product or a grouped product, by the average group size.

    Args:
        a: (..., k); or (m, r) with groups along the inner dimension.
        b: (k, n) or (n, k); or, for groups, (groups, k, n) or (r, n).
        groups: number of groups.
    """
    if torch.compiler.is_compiling() or not all(x.is_cpu and x.dtype == torch.float32 for x in (a, b)):
        return False
    inner = a.shape[-1]
    if inner == 0 or not own_products():
        return False
    rows, columns = a.numel() // inner, b.numel() // inner
    if b.dim() == 3:
        rows, columns = rows // groups, columns // groups
    else:
        inner //= groups
    return min(rows, inner, columns) >= smallest_product()


def _recorded(*factors: Tensor) -> bool:
    """Whether autograd records operations on these factors, so that the product must be an autograd operation."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in factors)


def _in_place_of_torchs(a: Tensor, b: Tensor) -> bool:
    """Whether to use a native product for these factors."""
    return not _recorded(a, b) and multiplies(a, b)


def product(a_mk: Tensor, b_kn: Tensor, out_mn: Tensor | None = None) -> Tensor:
    """``a b``, optionally written to ``out_mn``."""
    if not _in_place_of_torchs(a_mk, b_kn):
        return torch.mm(a_mk, b_kn) if out_mn is None else torch.mm(a_mk, b_kn, out=out_mn)
    out = a_mk.new_empty(a_mk.shape[0], b_kn.shape[1]) if out_mn is None else out_mn
    native.operators().product(a_mk, b_kn, out, False)
    return out


def linear(x: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    """``x W^T + b`` for x (..., in), outside autograd."""
    if not _in_place_of_torchs(x, weight_oi):
        return F.linear(x, weight_oi, bias_o)
    out = x.new_empty((*x.shape[:-1], weight_oi.shape[0]))  # not a view: an all-reduce may update it in place
    if bias_o is not None:
        out.copy_(bias_o.expand_as(out))
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    native.operators().product(rows, weight_oi.t(), out_rows, bias_o is not None)
    return out


def add_product_(total_nm: Tensor, a_tn: Tensor, b_tm: Tensor, fresh: bool = False) -> None:
    """``total += a^T b`` in a single pass over the total, which may have a wider dtype than the factors.

    Args:
        total_nm: the total, in the factors' dtype, or fp32 for bf16 or fp16 factors. On CUDA, the product is
            accumulated in it and never rounded to the factors' dtype; ``reference.add_product_`` rounds it.
        a_tn, b_tm: the factors, with equal dtypes.
        fresh: the total is uninitialized and is overwritten.
    """
    beta = 0 if fresh else 1
    if total_nm.dtype == a_tn.dtype:
        if _in_place_of_torchs(a_tn.t(), b_tm):
            native.operators().product(a_tn.t(), b_tm, total_nm, not fresh)
        else:
            torch.addmm(total_nm, a_tn.t(), b_tm, beta=beta, out=total_nm)
    elif adds_wide_products(total_nm):
        torch.addmm(total_nm, a_tn.t(), b_tm, out_dtype=total_nm.dtype, beta=beta, out=total_nm)
    else:
        reference.add_product_(total_nm, a_tn, b_tm, fresh)


def adds_wide_products(total: Tensor) -> bool:
    """Whether torch can accumulate products of half-precision factors in fp32 on this tensor's device."""
    return total.is_cuda and total.dtype == torch.float32


def grouped_product(a: Tensor, b: Tensor, ends_g: Tensor, out: Tensor | None = None) -> Tensor:
    """Products of consecutive groups, like ``torch.nn.functional.grouped_mm``.

    Args:
        a, b: (r, k) and (g, k, n), for groups of rows: the result is (r, n). Or (m, r) and (r, n), for groups along the
            inner dimension: the result is (g, m, n), zero for empty groups.
        ends_g: end of each group, int32.
        out: optional output buffer.
    """
    if not a.is_cpu or _recorded(a, b):
        return F.grouped_mm(a, b, offs=ends_g)
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (len(ends_g), a.shape[0], b.shape[1])
    out = a.new_empty(shape) if out is None else out
    if multiplies(a, b, len(ends_g)):
        native.operators().grouped_product(a, b, ends_g, out)
        return out
    first = 0
    for group, end in enumerate(ends_g.tolist()):
        if b.dim() == 3:
            torch.mm(a[first:end], b[group], out=out[first:end])
        else:
            torch.mm(a[:, first:end], b[first:end], out=out[group])
        first = end
    return out
