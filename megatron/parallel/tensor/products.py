"""Matrix products of linear layers: in the dtype of the factors, or from 8-bit numbers (``--fp8``).

Each rank scales its product back, so the sum over ranks is right with any scales. Still, a maximum over a split
dimension is taken over all of its ranks: the layer then quantizes the same numbers to the same codes with any number
of tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron.kernels import fp8
from megatron.kernels.products import linear, product
from megatron.parallel.tensor.collectives import TensorComm

Recipe = Literal["tensorwise", "rowwise"]
Scales = tuple[Tensor, ...]
Factor = tuple[Tensor, ...]
"""A factor of the weight's gradient: a matrix of tokens' rows, or its 8-bit numbers (t, ...) and their scale."""


class LinearProducts:
    """The products of x W^T + b and of its gradients, for x (..., in), W (out, in) and gradients (..., out).

    These are products in the dtype of the factors; subclasses have other formats.
    """

    records_8_bits: ClassVar[bool] = False
    """Whether the factors of the weight's gradient are 8-bit numbers."""

    def output(self, x: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> tuple[Tensor, Scales]:
        """x W^T + b, and the scales that the gradients' products need besides x and W."""
        return linear(x, weight_oi, bias_o), ()

    def grad_input(self, grad: Tensor, weight_oi: Tensor, scales: Scales) -> tuple[Tensor, Factor]:
        """Gradient of x, and the gradient of the output as a factor of the weight's gradient."""
        return _reshape_like(product(_rows(grad), weight_oi), grad), (grad,)

    def input_factor(self, x: Tensor, scales: Scales) -> Factor:
        """x as a factor of the weight's gradient."""
        return (x,)

    def grad_weight(self, space_oi: Tensor | None, factors: Sequence[Tensor]) -> Tensor:
        """Gradient of W from the factors of ``grad_input`` and ``input_factor``; may be written to ``space_oi``."""
        grad, x = factors
        return product(_rows(grad).t(), _rows(x), space_oi)


EXACT = LinearProducts()


@dataclass(frozen=True)
class TensorwiseProducts(LinearProducts):
    """All three products from 8-bit numbers with a scale per tensor: gradients in e5m2, other factors in e4m3.

    Args:
        comm: the tensor-parallel ranks.
        split_inputs: whether the layer is split by inputs instead of outputs.
    """

    records_8_bits = True
    comm: TensorComm
    split_inputs: bool

    def output(self, x: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> tuple[Tensor, Scales]:
        x_ti = _rows(x)
        scales = _e4m3_scales(x_ti, weight_oi, by_rows=False, shared_by=self.comm)
        quantized_x, weight = fp8.quantize(x_ti, scales[0], fp8.E4M3), fp8.quantize(weight_oi, scales[1], fp8.E4M3)
        return _reshape_like(fp8.scaled_product(quantized_x, weight, bias_o, fast=True), x), scales

    def grad_input(self, grad: Tensor, weight_oi: Tensor, scales: Scales) -> tuple[Tensor, Factor]:
        grad_to = _rows(grad)
        largest = fp8.largest(grad_to, by_rows=False)
        scale = fp8.scale_of(largest if self.split_inputs else self.comm.all_reduce_max_(largest), fp8.E5M2)
        quantized_grad = fp8.quantize(grad_to, scale, fp8.E5M2)
        product = fp8.scaled_product(quantized_grad, fp8.quantize(weight_oi.t(), scales[1], fp8.E4M3))
        return _reshape_like(product, grad), quantized_grad

    def input_factor(self, x: Tensor, scales: Scales) -> Factor:
        return fp8.quantize(_rows(x), scales[0], fp8.E4M3)

    def grad_weight(self, space_oi: Tensor | None, factors: Sequence[Tensor]) -> Tensor:
        grad_codes_to, grad_scale, x_codes_ti, x_scale = factors
        return fp8.scaled_product(
            fp8.Quantized(grad_codes_to.t().contiguous(), grad_scale),
            fp8.Quantized(x_codes_ti.t().contiguous(), x_scale),
        )


@dataclass(frozen=True)
class RowwiseProducts(LinearProducts):
    """Products from e4m3 numbers with a scale per row of either factor; the weight's gradient in the factors' dtype.

    The weight's gradient sums over tokens with gradients that differ by orders of magnitude: it stays exact.

    Args:
        comm: the tensor-parallel ranks.
        split_inputs: whether the layer is split by inputs instead of outputs.
    """

    comm: TensorComm
    split_inputs: bool

    def output(self, x: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> tuple[Tensor, Scales]:
        factors = self._quantize_factors(_rows(x), weight_oi, self.split_inputs)
        return _reshape_like(fp8.scaled_product(*factors, bias_o, fast=True), x), ()

    def grad_input(self, grad: Tensor, weight_oi: Tensor, scales: Scales) -> tuple[Tensor, Factor]:
        factors = self._quantize_factors(_rows(grad), weight_oi.t(), not self.split_inputs)
        return _reshape_like(fp8.scaled_product(*factors), grad), (grad,)

    def _quantize_factors(self, a_mk: Tensor, b_nk: Tensor, split: bool) -> tuple[fp8.Quantized, fp8.Quantized]:
        """Quantize both factors of a product; ``split``: whether its inner dimension is split over the ranks."""
        scales = _e4m3_scales(a_mk, b_nk, by_rows=True, shared_by=self.comm if split else None)
        return fp8.quantize(a_mk, scales[0], fp8.E4M3), fp8.quantize(b_nk, scales[1], fp8.E4M3)


def make_products(recipe: Recipe | None, comm: TensorComm, split_inputs: bool) -> LinearProducts:
    """Make the products of a recipe; exact products for None."""
    if recipe is None:
        return EXACT
    return (TensorwiseProducts if recipe == "tensorwise" else RowwiseProducts)(comm, split_inputs)


def _e4m3_scales(a_mk: Tensor, b_nk: Tensor, by_rows: bool, shared_by: TensorComm | None) -> tuple[Tensor, Tensor]:
    """Scales of two factors; their maxima are taken over all ranks of ``shared_by``, in a single exchange.

    Each has separate memory, at an alignment that matrix units may require.
    """
    largest = [fp8.largest(x, by_rows) for x in (a_mk, b_nk)]
    if shared_by is not None and shared_by.size > 1:
        joint_maxima = shared_by.all_reduce_max_(torch.cat([x.flatten() for x in largest]))
        maxima = joint_maxima.split([x.numel() for x in largest])
        largest = [flat.view(x.shape) for flat, x in zip(maxima, largest, strict=True)]
    return fp8.scale_of(largest[0], fp8.E4M3), fp8.scale_of(largest[1], fp8.E4M3)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _reshape_like(rows: Tensor, like: Tensor) -> Tensor:
    # Not a view for autograd: the sum over ranks may work in place on the output of a custom function.
    shaped: Tensor = torch.ops.aten._unsafe_view(rows, (*like.shape[:-1], rows.shape[-1]))
    return shaped
