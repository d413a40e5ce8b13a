"""Random numbers keyed by their purpose, independent of the layout.

Initial weights depend on (seed, logical name, row), dropout masks on (seed, draw of the sample, layer, site).
A mask is the same on any split and in recomputation, without saving or restoring generator states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.seeds import keyed_seed
from megatron.parallel.tensor.shards import ParamSpec

_INIT_ROWS = 256
"""Number of rows per generator seed: a rank skips the blocks of rows that it does not hold."""


Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""Draws fp32 values of a shape on the CPU."""


def normal(std: float) -> Draw:
    """Normal distribution with mean 0."""
    return lambda shape, generator: torch.randn(shape, generator=generator).mul_(std)


def uniform(bound: float) -> Draw:
    """Uniform distribution between -bound and bound."""
    return lambda shape, generator: torch.rand(shape, generator=generator).mul_(2 * bound).sub_(bound)


def fill_keyed(param: Tensor, spec: ParamSpec, name: str, seed: int, draw: Draw) -> None:
    """Fill a local slice from the logical parameter's values; padding becomes zero.

    The values are drawn on the CPU in fp32, so they are the same for every device, dtype and layout.
    """
    logical = spec.logical_shape
    with torch.no_grad():
        param.zero_()
        row_start = spec.start if spec.dim == 0 else 0
        row_stop = min(row_start + param.shape[0], logical[0])
        generator = torch.Generator()
        for block in range(row_start // _INIT_ROWS, -(-row_stop // _INIT_ROWS)):
            first = block * _INIT_ROWS
            rows = min(_INIT_ROWS, logical[0] - first)
            generator.manual_seed(keyed_seed(seed, name, block))
            values = draw((rows, *logical[1:]), generator)
            low, high = max(first, row_start), min(first + rows, row_stop)
            values = values[low - first : high - first]
            if spec.dim is not None and spec.dim > 0:
                stop = min(spec.start + param.shape[spec.dim], logical[spec.dim])
                values = values.narrow(spec.dim, spec.start, stop - spec.start)
            target = param[low - row_start : high - row_start]
            for dim in range(1, values.dim()):
                target = target.narrow(dim, 0, values.shape[dim])
            target.copy_(values)


@dataclass(frozen=True)
class DropoutKeys:
    """The key of a micro-batch's dropout masks.

    Args:
        seed: seed of the run.
        draws: position of each sample in the run's sample stream.
    """

    seed: int
    draws: tuple[int, ...]

    def at(self, *sites: tuple[int | str, ...]) -> SiteKeys:
        """Keys of sites in the model, such as (layer, "mlp")."""
        seeds = [[keyed_seed(self.seed, draw, *site) for draw in self.draws] for site in sites]
        return SiteKeys(torch.tensor(seeds, dtype=torch.int64))


@dataclass(frozen=True)
class SiteKeys:
    """Seeds (sites, samples) of dropout masks, int64, on the CPU, where generators take them.

    They are a tensor, because compiled code is the same for every micro-batch and layer and takes tensors as inputs.
    """

    seeds_nb: Tensor

    def keep_mask(self, site: int, shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
        """A mask per sample, stacked along dimension 0: 0 where dropped, else 1 / (1 - p).

        Args:
            site: index of the site among the sites with keys here.
            shape: shape of a sample's mask.
            p: probability of dropping.
            like: a tensor of the desired dtype and device. The CPU and CUDA draw different masks.
        """
        result: Tensor = _keyed_mask(self.seeds_nb[site], shape, p, like.dtype, like.device)
        return result

    def uniform(self, site: int, shape: tuple[int, ...], low: float, high: float, like: Tensor) -> Tensor:
        """Uniform random numbers of each sample, stacked along dimension 0; arguments as in ``keep_mask``."""
        values = torch.empty((self.seeds_nb.shape[1], *shape), dtype=like.dtype, device=like.device)
        generator = torch.Generator(device=like.device)
        for row, seed in zip(values, self.seeds_nb[site].tolist(), strict=True):
            generator.manual_seed(seed)
            row.uniform_(low, high, generator=generator)
        return values


@torch.library.custom_op("megatron::keyed_mask", mutates_args=())
def _keyed_mask(seeds_b: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """See ``SiteKeys.keep_mask``. For the compiler, a single operation that depends only on its arguments."""
    generator = torch.Generator(device=device)
    mask = torch.empty((len(seeds_b), *shape), dtype=dtype, device=device)
    for row, seed in zip(mask, seeds_b.tolist(), strict=True):
        generator.manual_seed(seed)
        row.bernoulli_(1.0 - p, generator=generator)
    return mask.div_(1.0 - p)


@_keyed_mask.register_fake
def _(seeds_b: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((seeds_b.shape[0], *shape), dtype=dtype, device=device)
