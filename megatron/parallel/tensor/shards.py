"""The place of a local tensor in its logical parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from megatron.topology.layout import Tie


@dataclass(frozen=True)
class ParamSpec:
    """A local parameter as a slice of a logical one.

    Args:
        logical_shape: the whole parameter's shape, without padding.
        dim: the dimension that is split over tensor-parallel ranks; None when every rank holds the whole parameter.
        start: index along ``dim`` at which the local slice begins.
        partial_grad: each tensor-parallel rank computes only its sequence part's share of the gradient, so the
            shares must be all-reduced (replicated parameters under sequence parallelism).
        tied_copy: a further holder of a logical parameter whose first holder is another stage.
        tied: which tied embedding it is, on any stage; None for other parameters.
        of_vocabulary: its rows are tokens' (an input embedding, or the output layer's weight).
        unshared: this tensor-parallel rank alone holds the parameter, whole; the others hold other ones.
        of_expert: it belongs to an expert: only the replicas that hold that expert reduce its gradient.
        blocks: of a hidden linear layer's weight, how its rows (all dimensions but the last, flattened) make matrices:
            sizes of consecutive blocks, which repeat; the i-th blocks of all repetitions are one matrix. Empty for
            other parameters.
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
        """Whether sums over the tensor-parallel ranks count what this rank of them holds."""
        return self.dim is not None or self.unshared or tp_rank == 0

    def offsets(self) -> tuple[int, ...]:
        """Offsets of the local tensor in the logical one."""
        return tuple(self.start if d == self.dim else 0 for d in range(len(self.logical_shape)))


class ShardedModule(nn.Module):
    """A module that knows the specs of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, ParamSpec] = {}
        self.logical_names: dict[str, str] = {}


def collect_specs(model: nn.Module) -> dict[str, tuple[str, ParamSpec]]:
    """Local parameter name -> (logical name, spec). Every rank holds the whole of a parameter without a spec."""
    specs: dict[str, tuple[str, ParamSpec]] = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            full = f"{prefix}.{name}" if prefix else name
            spec = module.specs.get(name) if isinstance(module, ShardedModule) else None
            logical = module.logical_names.get(name) if isinstance(module, ShardedModule) else None
            specs[full] = (logical or full, spec or ParamSpec(tuple(param.shape)))
    return specs


def with_partial_grad(spec: ParamSpec) -> ParamSpec:
    """The same spec for a parameter whose gradient is all-reduced over tensor-parallel ranks."""
    return replace(spec, partial_grad=True)
