"""The place of a local tensor in its logical parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron.distributed.layout import Tie


@dataclass(frozen=True)
class ParamSpec:
    """A local parameter as a slice of a logical parameter.

    Args:
        logical_shape: the whole parameter's shape, without padding.
        dim: the dimension that is split over tensor-parallel ranks; None if every rank holds the whole parameter.
        start: index along ``dim`` at which the local slice begins.
        partial_grad: whether each tensor-parallel rank computes only its sequence part's share of the gradient, so that
            the shares must be all-reduced (replicated parameters under sequence parallelism).
        tied_copy: whether it is a further copy of a logical parameter whose first holder is another stage.
        tied: the tied embedding, on any stage; None for other parameters.
        of_vocabulary: whether its rows belong to tokens (an input embedding, or the output layer's weight).
        unshared: whether only this tensor-parallel rank holds the parameter, whole; the others hold other parameters.
        of_expert: whether it belongs to an expert, so that only replicas of that expert reduce its gradient.
        blocks: how the rows of a hidden linear layer's weight (all dimensions but the last, flattened) form matrices:
            sizes of consecutive blocks, which repeat; the i-th blocks of all repetitions form a matrix. Empty for other
            parameters.
    """

    logical_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    partial_grad: bool = False
    tied_copy: bool = False
    tied: Tie | None = None
    of_expert: bool = False
    blocks: tuple[int, ...] = ()
    of_vocabulary: bool = False
    unshared: bool = False

    def counted_by(self, tp_rank: int) -> bool:
        """Whether this tensor-parallel rank counts its part in sums over these ranks."""
        return self.dim is not None or self.unshared or tp_rank == 0

    def offsets(self) -> tuple[int, ...]:
        """Offsets of the local tensor in the logical tensor."""
        return tuple(self.start if d == self.dim else 0 for d in range(len(self.logical_shape)))


class ShardedModule(nn.Module):
    """A module with specs of its direct parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, ParamSpec] = {}
        self.logical_names: dict[str, str] = {}


def collect_specs(model: nn.Module) -> dict[str, tuple[str, ParamSpec]]:
    """Local parameter name -> (logical name, spec). Every rank holds the whole of a parameter without a spec."""
    specs: dict[str, tuple[str, ParamSpec]] = {}
    for prefix, module in model.named_modules():
        direct_params = dict(module.named_parameters(recurse=False))
        for name, param in direct_params.items():
            full = f"{prefix}.{name}" if prefix else name
            spec = module.specs.get(name) if isinstance(module, ShardedModule) else None
            logical = module.logical_names.get(name) if isinstance(module, ShardedModule) else None
            specs[full] = (logical or full, spec or ParamSpec(tuple(param.shape)))
    return specs
