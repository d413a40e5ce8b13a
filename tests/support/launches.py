"""A pretended device that loads kernels late: it notes each launch, and first launches beside a pending receive.

CUDA loads a kernel's code at its first launch, which can wait for running kernels, and NCCL's receives run
there from the moment they are posted until their message comes. On a CPU both are pretended: a launch is an operator of
torch with the dtypes, shapes and strides of its tensors, loaded once it has run; a receive is pending from its posting
until the host knows that it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.distributed.group import Group, Pending
from megatron.parallel.pipeline.engine import PipelineEngine

_NO_LAUNCH = frozenset(
    f"aten.{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "lift_fresh"),
        *("_unsafe_view", "_local_scalar_dense", "is_same_size", "_has_compatible_shallow_copy_type", "item"),
    )
)
_MESSAGES = frozenset({"c10d.send", "c10d.recv_"})


class PretendedDevice(TorchDispatchMode):
    """Notes launches in this thread while it is active.

    Attributes:
        violations: launches that were the first of their kind while a receive was pending.
        ahead: receives that were pending at a launch, at most, since ``begin``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[Any] = set()
        self.violations: list[str] = []
        self.ahead = 0
        self.step = ""
        self._pending: list[Pending] = []
        self._waited: set[int] = set()
        self._names: dict[Any, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the check would be made at each launch

    def begin(self, step: str) -> None:
        """A step of a name begins."""
        self.step, self.ahead = step, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in self._names:
            name = str(func._schema.name).replace("::", ".")
            self._names[func] = "" if func.is_view or name in _NO_LAUNCH or name in _MESSAGES else name
        if name := self._names[func]:
            self._launch(
                name, [leaf for leaf in _leaves((*args, *(kwargs or {}).values())) if isinstance(leaf, Tensor)]
            )
        return func(*args, **(kwargs or {}))

    def _launch(self, name: str, tensors: Sequence[Tensor]) -> None:
        kind = (name, *((x.dtype, tuple(x.shape), x.stride()) for x in tensors))
        self.ahead = max(self.ahead, len(self._pending))
        if self._pending and kind not in self.loaded:
            whose = ", ".join(pending.description for pending in self._pending)
            self.violations.append(f"{self.step}: {name} {[tuple(x.shape) for x in tensors]} beside {whose}")
        self.loaded.add(kind)

    def posted(self, pending: Pending) -> Pending:
        """A receive is on the device from now on."""
        self._pending.append(pending)
        return pending

    def waited(self, pending: Pending) -> None:
        """Later launches come behind a receive; the host goes on at once."""
        self._waited.add(id(pending))

    def settled(self, pending: Pending) -> None:
        """The host knows that a receive is done, and so are those that were waited for before."""
        if any(other is pending for other in self._pending):
            self._pending = [other for other in self._pending if id(other) not in self._waited]
            self._waited.clear()


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """An operator's arguments, with the members of lists in their place."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """Makes this rank's CPU a device that loads kernels late; engines built inside behave as on such a device."""
    device = PretendedDevice()
    recv, wait, synchronize, init = Group.recv, Pending.wait, Pending.synchronize, PipelineEngine.__init__

    def posting(self: Group, x: Tensor, src: int, tag: int = 0) -> Pending:
        return device.posted(recv(self, x, src, tag))

    def waiting(self: Pending) -> None:
        wait(self)
        device.waited(self)

    def settling(self: Pending) -> None:
        synchronize(self)
        device.settled(self)

    def late(self: PipelineEngine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.loads_kernels_lazily = True

    patches = (
        mock.patch.object(Group, "recv", posting),
        mock.patch.object(Pending, "wait", waiting),
        mock.patch.object(Pending, "synchronize", settling),
        mock.patch.object(PipelineEngine, "__init__", late),
    )
    for patch in patches:
        patch.start()
    try:
        with device:
            yield device
    finally:
        for patch in patches:
            patch.stop()
