"""The two contracts that a compressor author needs.

``Codec`` serves point-to-point and gather traffic: one tensor in, one message out, and back.
``RoundCompressor`` serves sums over a group: a generator that yields what it wants communicated. Neither ever
sees a process group; the communication points in ``megatron.comm`` do the sending and the counting.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.compression.approximation import Approximation, write
from megatron.compression.state import CompressorState


class Op(enum.Enum):
    """What a round asks of the group."""

    REDUCE = "reduce"
    """Sum the tensor over the group, in place."""
    GATHER = "gather"
    """Concatenate the tensors of all ranks along a new first dimension."""
    BROADCAST = "broadcast"
    """Overwrite the tensor by the first rank's."""
    EXCHANGE = "exchange"
    """Send row i of the tensor to rank i; the result's rows are what the ranks sent here, in their order."""


@dataclass(frozen=True)
class Request:
    """One round's communication.

    Args:
        tensor: contiguous tensor to communicate; REDUCE and BROADCAST work in place.
        op: what to do with it.
        shard_only: this rank will read only its own equal share of the sum (the sharded optimizer's case), so
            a reduce-scatter may serve a REDUCE. Elements outside the share are then undefined.
    """

    tensor: Tensor
    op: Op = Op.REDUCE
    shard_only: bool = False


@dataclass(frozen=True)
class Aggregate:
    """What ``RoundCompressor.rounds`` returns.

    Args:
        total: the (approximate) sum over the group, with the input's shape and dtype where it is a tensor.
        local: what this rank contributed to that sum; error feedback keeps ``input - local``. None stands for
            exactly the input, which may be overwritten by now.
    """

    total: Tensor | Approximation
    local: Tensor | Approximation | None


@dataclass(frozen=True)
class Peers:
    """The group that sums: this rank's place in it, and its size."""

    rank: int
    size: int


class RoundCompressor(ABC):
    """Approximates the sum of one tensor over a group in one or more rounds.

    ``stacks`` says what the tensor is. False: anything, flat buckets included. True: k equally shaped parameters in
    a stack (k, *shape), each compressed on its own; the caller asks ``pays`` which shapes are worth it and sums the
    others exactly.
    """

    stacks = False

    settles = False
    """Whether ``settle`` changes what is kept: then all ranks agree before that the step's gradients are finite."""

    observes = False
    """Whether ``observe`` wants the optimizer's update."""

    freezes_variance = False
    """Whether the optimizer must leave Adam's second moments as they are while this compressor is on."""

    clips_first = False
    """Whether each replica's gradient is clipped before the sum, not the sum after, as it carries too much noise."""

    index_sets: tuple[str, ...] = ()
    """Names of state tensors that are indices into the flattened input."""

    steady: tuple[str, ...] = ()
    """Names of counters that do not decide which operations run: those that only enter random seeds, say."""

    def __init__(self, config: Any = None) -> None:
        """``config`` is an instance of the registered options class."""
        self.config = config

    def pays(self, shape: tuple[int, ...]) -> bool:
        """Whether parameters of this shape should be compressed; the others are summed exactly."""
        return True

    def launches(self, state: CompressorState) -> Hashable:
        """What of the state decides which operations the next sum will run, beside options and shapes.

        Where this value was met before, every kernel that the sum needs has been launched before. None says that
        nothing is known: that costs overlap on CUDA, while a value that says too little can hang it.
        """
        return state.layout(self.steady)

    def observe(self, update: Tensor, state: CompressorState) -> None:
        """Takes the update of a step whose sums set the counter ``awaiting``, if ``observes``.

        Args:
            update: the optimizer's direction, weight decay included, whatever the learning rate; shaped like the input
                of ``rounds``.
            state: that of ``rounds``.
        """
        raise NotImplementedError

    @abstractmethod
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        """Yields requests, receives their results, and returns the aggregate.

        Args:
            x: contiguous; it belongs to the compressor, which may change it, until ``settle``.
            state: what this tensor's earlier sums left.
            peers: who sums.

        Every rank of the group must yield the same sequence of operations and shapes; that is a property of the
        algorithm, the caller cannot check it.
        """

    def settle(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        """Leaves the sum in ``x``. Called once it is known that the gradients are finite on all ranks, if ``settles``.

        State as large as ``x`` is changed here, in place (``state.owned``), as there is no way back from this point;
        ``stage`` would need room for both its old and its new value.

        Args:
            x: as ``rounds`` left it.
            aggregate: what ``rounds`` returned.
            state, peers: those of ``rounds``.
        """
        write(aggregate.total, x)


@dataclass(frozen=True)
class Payload:
    """One message: ``wire`` is contiguous and its layout is fixed by the input's shape and dtype."""

    wire: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.wire.numel() * self.wire.element_size()


class Codec(ABC):
    """Encodes a tensor into one message and back; both ends evolve equal state from equal bytes.

    Messages, inputs, states and results have memory of their own, as each has a holder who may overwrite it: a message
    is on its way when the next one is encoded, error feedback changes what it gave to ``encode``, and layers change
    what was decoded. Two exceptions save copies: the message of an ``exact`` codec may be its input, and the result of
    ``decode`` may lie in the message, which the receiver gives up.
    """

    exact = False
    """Whether a tensor comes back as it was, whatever it holds. The others are handed finite numbers in fp32 (or
    fp64), gradients without the loss scale."""

    widened = True
    """Whether activations are converted to fp32 (or fp64) first; False for codecs that may send them as they are."""

    shared: tuple[str, ...] = ()
    """Names of the state that both ends must hold equal; the rest is the sender's own."""

    steady: tuple[str, ...] = ()
    """Names of counters and memories of samples that do not decide which operations run."""

    def __init__(self, config: Any = None) -> None:
        """``config`` is an instance of the registered options class."""
        self.config = config

    def pays(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether the message of a tensor is smaller than the tensor was in this dtype, before it was widened."""
        return True

    def launches(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        """What of the state and the keys decides which operations a step's messages will run at one of their ends,
        beside options, shape and dtype; see ``RoundCompressor.launches``.

        Args:
            shape: of the tensors.
            state: that end's, before the step.
            keys: of the messages, in their order.
        """
        return state.layout(self.steady)

    @abstractmethod
    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        """A receive buffer for the message of a tensor of this shape and dtype.

        Called once for each message, in the order of the messages; ``key`` names the content that will come.
        """

    def expect(self, shape: torch.Size, state: CompressorState, key: Hashable) -> None:  # noqa: B027  # optional
        """A tensor of this shape will soon be encoded under ``key``: time to fetch what that needs. Changes nothing."""

    @abstractmethod
    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        """Turns ``x`` into a message. ``key`` names the content (sample ids), for codecs with a memory."""

    @abstractmethod
    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        """Turns a message back into a tensor of the given shape and dtype."""

    def reconstruct(self, payload: Payload, x: Tensor, state: CompressorState, key: Hashable) -> Tensor | Approximation:
        """What the receiver of ``encode``'s message of ``x`` will decode; called by the sender, who only reads it."""
        return self.decode(payload, x.shape, x.dtype, state, key)

    def decode_gathered(
        self,
        payloads: Payload,
        size: int,
        shape: torch.Size,
        dtype: torch.dtype,
        state: CompressorState,
        key: Hashable,
    ) -> Tensor:
        """Decodes ``size`` messages that lie one behind the other along dimension 0, and concatenates them."""
        wires = payloads.wire.view(size, payloads.wire.shape[0] // size, *payloads.wire.shape[1:])
        return torch.cat([self.decode(Payload(wire), shape, dtype, state, key) for wire in wires])
