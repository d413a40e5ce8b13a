"""Contiguous parameters and gradients of a model chunk, cut into buckets.

Parameters and gradients of a chunk lie in two flat tensors in the same order, so that a single collective serves many
parameters and the sharded optimizer can own any equal part of a bucket.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from megatron.distributed.group import Group
from megatron.parallel.tensor.main_grad import MainGrad, attach
from megatron.parallel.tensor.shards import ParamSpec

_ALIGNED = 8
"""Alignment in elements: 16 bytes, which GPU matrix products want, in the narrowest dtype."""
_AT_ONCE = 1 << 18
"""Elements converted per piece: few enough to stay in a processor's cache until they are added."""


NamedParam = tuple[str, str, ParamSpec, nn.Parameter]
"""A parameter: its local name, its logical name, its spec, and itself."""


def replaces_grads(device: torch.device) -> bool:
    """Whether the first gradients of a step overwrite those of the last step, which are then not cleared."""
    return device.type == "cpu"


class BucketKind(enum.Enum):
    """The reason why a bucket is separate from the others."""

    PLAIN = "plain"
    """Reduced as soon as backward has filled it."""
    REPLICATED = "replicated"
    """Parameters replicated on every tensor-parallel rank: a compressor of whole buckets must treat them alike on all
    of these ranks, so nothing that differs between ranks may share their buckets."""
    PARTIAL = "partial"
    """Parameters whose gradients must first be all-reduced over tensor-parallel ranks (sequence parallelism)."""
    TIED = "tied"
    """A tied embedding: alone, so that all of its holders cut it into the same shares."""


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
    """A range of the flat tensors that is reduced as a whole; its length is a multiple of the number of shares."""

    kind: BucketKind
    start: int
    stop: int
    slots: tuple[ParamSlot, ...]


class FlatBuffer:
    """Flat parameters and gradients of a chunk, for parameters with the same replicas.

    Args:
        params: (local name, logical name, spec, parameter) in the order of the forward pass.
        grad_dtype: dtype in which gradients accumulate.
        group: the ranks that hold replicas of these parameters.
        bucket_elements: buckets are closed at this size; None puts everything in a single bucket.
        sharded: every bucket must divide into equal parts, one per replica.
        tensor_parallel: there are several tensor-parallel ranks.
        chunk: number of the chunk on this rank.

    After construction the parameters are views into ``params_flat``; where the dtypes agree their ``grad`` is a view
    into ``grads_flat`` that autograd accumulates into, else a hook adds each gradient there. On CPUs, where clearing
    and adding are expensive, the first gradient of a step overwrites the previous contents instead, and backward
    functions write it themselves (``MainGrad``).
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
    ) -> None:
        self.group, self.chunk = group, chunk
        shares = group.size if sharded else 1
        self.buckets = plan_buckets(params, shares, bucket_elements, tensor_parallel)
        first = params[0][3]
        size = self.buckets[-1].stop
        self.params_flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads_flat = torch.zeros(size, dtype=grad_dtype, device=first.device)
        self.direct = grad_dtype == first.dtype
        self._on_bucket_full: Callable[[int], None] | None = None
        self._missing: list[int] = []
        self._replaces = replaces_grads(first.device)
        self._main_grads: list[tuple[nn.Parameter, MainGrad]] = []
        self._nodes: list[Node] = []
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                self._adopt(slot, index)

    def _adopt(self, slot: ParamSlot, bucket: int) -> None:
        """Moves a parameter into the flat tensors and hooks its gradient."""
        param = slot.param
        view = self.params_flat[slot.start : slot.stop].view(param.shape)
        view.copy_(param.data)
        param.data = view
        memory = self.grads_flat[slot.start : slot.stop].view(param.shape)
        main_grad = attach(param, memory) if self.direct and self._replaces else MainGrad(memory)
        self._main_grads.append((param, main_grad))
        if self.direct:
            param.grad = memory
        has_finished = False  # in the running backward

        def before_accumulation(gradients: Sequence[Tensor | None]) -> None:
            """Have autograd add to what functions have written; without a gradient of autograd's, finish here."""
            nonlocal has_finished
            has_finished = gradients[0] is None
            if self.direct and main_grad.open and main_grad.written:
                param.grad = memory
            if has_finished:
                finish()

        def after_accumulation(param: nn.Parameter) -> None:
            """Take a gradient that autograd has stored; some versions of torch call this without any, too."""
            if has_finished:
                return
            grad = param.grad
            if grad is not None and grad is not memory:
                self._take(param, main_grad, grad)
            finish()

        def finish() -> None:
            # Without a gradient, or while a forward's claim is open, the range is not final: the reducer launches the
            # bucket when all backwards are over.
            if self._on_bucket_full is not None and main_grad.written:
                self._missing[bucket] -= 1
                if self._missing[bucket] == 0:
                    self._on_bucket_full(bucket)

        # The node lives as long as somebody holds it, and its hooks with it.
        node = get_gradient_edge(param).node
        node.register_prehook(before_accumulation)
        self._nodes.append(node)
        param.register_post_accumulate_grad_hook(after_accumulation)

    def _take(self, param: nn.Parameter, main_grad: MainGrad, grad: Tensor) -> None:
        """Moves a gradient from memory of autograd's to the main gradient."""
        param.grad = None
        if not main_grad.written:
            main_grad.accumulate(lambda _: grad.detach())
        elif self.direct:  # a recorded backward (create_graph) has added to the main gradient out of place
            main_grad.memory.copy_(grad.detach())
        else:
            _add_converted(main_grad.memory, grad)
        if self.direct and main_grad.written:
            param.grad = main_grad.memory

    def begin_grads(self) -> None:
        """Begins a step's gradients; also drops the pending notification of an abandoned step.

        Until its first gradient, or ``complete_grads``, a parameter's range of ``grads_flat`` is undefined. Padding is
        zero from here on: a bucket may be launched as soon as its parameters have their gradients.
        """
        self._on_bucket_full = None
        if not self._replaces:
            self.grads_flat.zero_()
            return
        for param, main_grad in self._main_grads:
            param.grad = None
            main_grad.begin()
        for bucket in self.buckets:
            self.grads_flat[bucket.slots[-1].stop : bucket.stop].zero_()

    def complete_grads(self) -> None:
        """After a step's last backward: zeroes the gradients of parameters that received none."""
        if not self._replaces:
            return
        for param, main_grad in self._main_grads:
            main_grad.complete()
            if self.direct:
                param.grad = main_grad.memory

    def notify_when_full(self, on_bucket_full: Callable[[int], None]) -> None:
        """Announces the step's last backward: calls back with each bucket that it completes."""
        self._on_bucket_full = on_bucket_full
        self._missing = [len(bucket.slots) for bucket in self.buckets]

    def params_of(self, bucket: Bucket) -> Tensor:
        """Flat parameters of a bucket, padding included."""
        return self.params_flat[bucket.start : bucket.stop]

    def grads_of(self, bucket: Bucket) -> Tensor:
        """Flat gradients of a bucket, padding included."""
        return self.grads_flat[bucket.start : bucket.stop]


def _add_converted(main_grad: Tensor, grad: Tensor) -> None:
    """Adds a gradient of another dtype; on a CPU torch would first convert a copy of all of it."""
    if main_grad.is_cpu:
        for chunk, addend in zip(main_grad.view(-1).split(_AT_ONCE), grad.reshape(-1).split(_AT_ONCE), strict=True):
            chunk.add_(addend)
    else:
        main_grad.add_(grad)


def _kind(spec: ParamSpec, tensor_parallel: bool) -> BucketKind:
    if spec.tied is not None:
        return BucketKind.TIED
    if spec.partial_grad:
        return BucketKind.PARTIAL
    return BucketKind.REPLICATED if tensor_parallel and spec.dim is None and not spec.unshared else BucketKind.PLAIN


def plan_buckets(
    params: Sequence[NamedParam],
    shares: int,
    bucket_elements: int | None,
    tensor_parallel: bool,
) -> list[Bucket]:
    """Buckets in the order in which backward fills them: plain buckets from the model's end, then the others."""
    buckets: list[Bucket] = []
    for kind in BucketKind:
        members = [p for p in reversed(params) if _kind(p[2], tensor_parallel) is kind]
        for bucket_params in _fill(members, 1 if kind is BucketKind.TIED else bucket_elements):
            start = position = buckets[-1].stop if buckets else 0
            slots: list[ParamSlot] = []
            for name, logical, spec, param in _equal_shapes_adjoin(bucket_params):
                slots.append(ParamSlot(name, logical, spec, param, position, position + param.numel()))
                position += param.numel()
            multiple = shares * _ALIGNED
            buckets.append(Bucket(kind, start, start + -(-(position - start) // multiple) * multiple, tuple(slots)))
    return buckets


def _fill(members: Sequence[NamedParam], bucket_elements: int | None) -> list[Sequence[NamedParam]]:
    """Splits a list of parameters into buckets of at least ``bucket_elements`` elements."""
    groups: list[Sequence[NamedParam]] = []
    begin = size = 0
    for end, member in enumerate(members, 1):
        size += member[3].numel()
        if end == len(members) or (bucket_elements is not None and size >= bucket_elements):
            groups.append(members[begin:end])
            begin, size = end, 0
    return groups


def _equal_shapes_adjoin(members: Sequence[NamedParam]) -> list[NamedParam]:
    """Orders matrices before vectors and equal shapes adjacently, so that compressors get stacks without a copy.

    Expert parameters follow the model's order, not that of backward, so that grouped products get stacks, too. Odd
    sizes come last, which keeps all others aligned.
    """
    shapes = list(dict.fromkeys(member[3].shape for member in members))

    def sort_key(numbered: tuple[int, NamedParam]) -> tuple[bool, bool, int, bool, list[str], int]:
        number, (name, _, spec, param) = numbered
        order = spec.of_expert, name.split(".")[-2:] if spec.of_expert else [], -number if spec.of_expert else number
        return bool(param.numel() % _ALIGNED), param.dim() < 2, shapes.index(param.shape), *order

    return [member for _, member in sorted(enumerate(members), key=sort_key)]


def named_params(specs: Mapping[str, tuple[str, ParamSpec]], model: nn.Module) -> list[NamedParam]:
    """The model's parameters in the form that ``FlatBuffer`` takes."""
    return [(name, *specs[name], param) for name, param in model.named_parameters()]
