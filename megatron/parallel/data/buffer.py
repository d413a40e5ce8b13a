"""Contiguous parameters and gradients of a model chunk, divided into buckets.

Parameters and gradients of a chunk are stored in two flat tensors in the same order, so that a single collective
transfers many parameters, and each rank of the sharded optimizer owns an equal share of every bucket.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from megatron.distributed.group import Group
from megatron.parallel.tensor.main_grad import MainGrad, WeightGrads, attach_main_grad
from megatron.parallel.tensor.shards import ParamSpec

_ALIGNMENT = 8
"""Alignment in elements: 16 bytes in the narrowest dtype, for GPU matrix products."""


class NamedParam(NamedTuple):
    """A parameter with its local and logical names."""

    name: str
    logical_name: str
    spec: ParamSpec
    param: nn.Parameter


def replaces_grads(device: torch.device) -> bool:
    """Whether a step's first gradients overwrite the last step's gradients, which makes clearing unnecessary."""
    return device.type == "cpu"


class BucketKind(enum.Enum):
    """Kind of parameters in a bucket. Parameters of different kinds never share a bucket."""

    PLAIN = "plain"
    """Parameters whose bucket is reduced as soon as backward has filled it."""
    REPLICATED = "replicated"
    """Parameters replicated over tensor-parallel ranks. A compressor of whole buckets must give these ranks the same
    result, so their buckets hold no other parameters."""
    PARTIAL = "partial"
    """Parameters with partial gradients, first all-reduced over tensor-parallel ranks (sequence parallelism)."""
    TIED = "tied"
    """A tied embedding, in a separate bucket so that all stages with a copy divide it into the same shares."""


@dataclass(frozen=True)
class ParamSlot:
    """A parameter's place in the flat tensors."""

    name: str
    logical_name: str
    spec: ParamSpec
    param: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """A range of the flat tensors that is reduced as a unit. The length is a multiple of the number of shares."""

    kind: BucketKind
    start: int
    stop: int
    slots: tuple[ParamSlot, ...]


class FlatBuffer:
    """Flat parameters and gradients of a chunk, for all parameters with the same replicas.

    Args:
        params: parameters in the order of the forward pass.
        grad_dtype: dtype of accumulated gradients.
        group: ranks with replicas of these parameters.
        bucket_elements: minimum size of a bucket in elements; None for a single bucket.
        sharded: whether every bucket must divide into equal shares, one per replica.
        tensor_parallel: whether there are several tensor-parallel ranks.
        chunk: number of the chunk on this rank.
        weight_grads: records of gradients that weight passes compute.
        delayed: whether gradients are reduced in separate memory while the next step computes its gradients.

    After construction, the parameters are views of ``params_flat``. If the dtypes agree, their ``grad`` is a view of
    ``grads_flat`` into which autograd accumulates, else a hook adds each gradient to ``grads_flat``. On CPUs, where
    clearing and adding are expensive, the first gradient of a step overwrites the previous contents, and backward
    functions write the gradient themselves (``MainGrad``).

    ``reduced_flat`` holds the gradients that are reduced and applied: ``grads_flat`` itself, unless ``delayed``.
    """

    def __init__(
        self,
        params: Sequence[NamedParam],
        grad_dtype: torch.dtype,
        group: Group,
        bucket_elements: int | None,
        *,
        sharded: bool = False,
        tensor_parallel: bool = False,
        chunk: int = 0,
        weight_grads: WeightGrads | None = None,
        delayed: bool = False,
    ) -> None:
        self.group, self.chunk = group, chunk
        self._weight_grads = weight_grads or WeightGrads()
        shares = group.size if sharded else 1
        self.buckets = plan_buckets(params, shares, bucket_elements, tensor_parallel)
        first = params[0].param
        size = self.buckets[-1].stop
        self.params_flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads_flat = torch.zeros(size, dtype=grad_dtype, device=first.device)
        self.reduced_flat = torch.zeros_like(self.grads_flat) if delayed else self.grads_flat
        self.direct = grad_dtype == first.dtype
        self._on_bucket_full: Callable[[int], None] | None = None
        self._num_missing: list[int] = []
        self._replaces = replaces_grads(first.device)
        self._main_grads: list[tuple[nn.Parameter, MainGrad]] = []
        self._nodes: list[Node] = []
        self._hooks: list[RemovableHandle] = []
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                self._place_param(slot, index)

    def _place_param(self, slot: ParamSlot, bucket: int) -> None:
        """Move a parameter into the flat tensors, and register the hooks for its gradient."""
        param = slot.param
        view = self.params_flat[slot.start : slot.stop].view(param.shape)
        view.copy_(param.data)
        param.data = view
        memory = self.grads_flat[slot.start : slot.stop].view(param.shape)
        if self.direct:
            param.grad = memory
        has_finished = False  # in the running backward

        def before_accumulation(gradients: Sequence[Tensor | None]) -> None:
            """Set ``param.grad``, so that autograd adds to the written gradient; without a gradient, finish."""
            nonlocal has_finished
            has_finished = gradients[0] is None
            if self.direct and main_grad.open and main_grad.written:
                param.grad = memory
            if has_finished:
                finish()

        def after_accumulation(param: nn.Parameter) -> None:
            """Move a gradient that autograd has stored. Some torch versions call the hook without a gradient, too."""
            if has_finished:
                return
            if param.grad is not None and param.grad is not memory:
                grad, param.grad = param.grad.detach(), None
                if main_grad.written and self.direct:  # a recorded backward (create_graph) has added to it out of place
                    memory.copy_(grad)
                else:
                    main_grad.add(grad)
                if self.direct and main_grad.written:
                    param.grad = memory
            finish()

        def finish() -> None:
            # The range is not final without a gradient, while a forward pass has claimed the memory, or before all
            # weight passes. Without a gradient, the reducer launches the bucket after the last backward.
            if self._on_bucket_full is not None and main_grad.written and not main_grad.num_recorded:
                self._num_missing[bucket] -= 1
                if self._num_missing[bucket] == 0:
                    self._on_bucket_full(bucket)

        main_grad = MainGrad(memory, self._weight_grads, self.direct, finish)
        attach_main_grad(param, main_grad)
        self._main_grads.append((param, main_grad))
        # The hooks live as long as a reference to the node.
        node = get_gradient_edge(param).node
        self._hooks.append(node.register_prehook(before_accumulation))
        self._nodes.append(node)
        self._hooks.append(param.register_post_accumulate_grad_hook(after_accumulation))

    def release(self) -> None:
        """Remove the hooks, which autograd holds and Python's garbage collector does not see, after the last use."""
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()

    def begin_grads(self) -> None:
        """Begin a step's gradients, and cancel the notifications of an abandoned step.

        A parameter's range of ``grads_flat`` is undefined until its first gradient or ``complete_grads``. Padding is
        zeroed now, because a bucket may be launched as soon as its parameters have gradients.
        """
        self._on_bucket_full = None
        for _, main_grad in self._main_grads:
            main_grad.num_recorded = 0
        if not self._replaces:
            self.grads_flat.zero_()
            return
        for param, main_grad in self._main_grads:
            param.grad = None
            main_grad.begin_step()
        for bucket in self.buckets:
            self.grads_flat[bucket.slots[-1].stop : bucket.stop].zero_()

    def complete_grads(self) -> None:
        """Zero the gradients of parameters without a gradient, after the last backward of a step."""
        if not self._replaces:
            return
        for param, main_grad in self._main_grads:
            main_grad.end_step()
            if self.direct:
                param.grad = main_grad.memory

    def notify_when_full(self, on_bucket_full: Callable[[int], None]) -> None:
        """Call ``on_bucket_full`` with the index of each bucket that the coming, last backward of the step fills."""
        self._on_bucket_full = on_bucket_full
        self._num_missing = [len(bucket.slots) for bucket in self.buckets]

    def params_of(self, bucket: Bucket) -> Tensor:
        """Flat parameters of a bucket, including padding."""
        return self.params_flat[bucket.start : bucket.stop]

    def grads_of(self, bucket: Bucket) -> Tensor:
        """Flat gradients of a bucket to reduce and apply, including padding."""
        return self.reduced_flat[bucket.start : bucket.stop]


def plan_buckets(
    params: Sequence[NamedParam],
    shares: int,
    bucket_elements: int | None,
    tensor_parallel: bool,
) -> list[Bucket]:
    """Plan buckets in the order in which backward fills them: plain buckets from the last layer, then other kinds."""
    by_kind: dict[BucketKind, list[NamedParam]] = {kind: [] for kind in BucketKind}
    for member in reversed(params):
        spec, kind = member.spec, BucketKind.PLAIN
        if spec.tied is not None:
            kind = BucketKind.TIED
        elif spec.partial_grad:
            kind = BucketKind.PARTIAL
        elif tensor_parallel and spec.dim is None and not spec.unshared:
            kind = BucketKind.REPLICATED
        by_kind[kind].append(member)
    buckets: list[Bucket] = []
    for kind, members in by_kind.items():
        for bucket_params in _split_params(members, 1 if kind is BucketKind.TIED else bucket_elements):
            start = position = buckets[-1].stop if buckets else 0
            slots: list[ParamSlot] = []
            for name, logical, spec, param in _sort_params(bucket_params):
                slots.append(ParamSlot(name, logical, spec, param, position, position + param.numel()))
                position += param.numel()
            multiple = shares * _ALIGNMENT
            buckets.append(Bucket(kind, start, start + -(-(position - start) // multiple) * multiple, tuple(slots)))
    return buckets


def _split_params(members: Sequence[NamedParam], bucket_elements: int | None) -> list[Sequence[NamedParam]]:
    """Split a list of parameters into buckets of at least ``bucket_elements`` elements."""
    groups: list[Sequence[NamedParam]] = []
    begin = size = 0
    for end, member in enumerate(members, 1):
        size += member.param.numel()
        if end == len(members) or (bucket_elements is not None and size >= bucket_elements):
            groups.append(members[begin:end])
            begin, size = end, 0
    return groups


def _sort_params(members: Sequence[NamedParam]) -> list[NamedParam]:
    """Sort matrices before vectors and equal shapes next to each other, so that compressors stack them without a copy.

    Expert parameters follow the order of the model instead of backward, so that grouped products use stacks, too. Odd
    sizes come last, which keeps all other parameters aligned.
    """
    shapes = list(dict.fromkeys(member.param.shape for member in members))

    def sort_key(numbered: tuple[int, NamedParam]) -> tuple[bool, bool, int, bool, list[str], int]:
        number, (name, _, spec, param) = numbered
        order = spec.of_expert, name.split(".")[-2:] if spec.of_expert else [], -number if spec.of_expert else number
        return bool(param.numel() % _ALIGNMENT), param.dim() < 2, shapes.index(param.shape), *order

    return [member for _, member in sorted(enumerate(members), key=sort_key)]


def named_params(specs: Mapping[str, tuple[str, ParamSpec]], model: nn.Module) -> list[NamedParam]:
    """List the model's parameters for ``FlatBuffer``."""
    return [NamedParam(name, *specs[name], param) for name, param in model.named_parameters()]
