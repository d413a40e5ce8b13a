"""The two contracts that a compressor author needs.

``Codec`` serves point-to-point and gather traffic: one tensor in, one message out, and back.
``RoundCompressor`` serves all-reduces over a group: a generator that yields what it wants communicated. Neither ever
sees a process group; the communication points in ``megatron.comm`` do the sending and the counting. What a compressor
needs beyond that it declares (``SumTraits``, ``CodecTraits``) or overrides, and is served, built-in or plug-in.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.compression.approximation import Approximation, write
from megatron.compression.points import Point
from megatron.compression.schedule import Activation
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


class Compressor:
    """What codecs and compressors of sums have in common: options, and what they know about where they can work."""

    def __init__(self, config: Any = None) -> None:
        """``config`` is an instance of the registered options class."""
        self.config = config

    def problem(self, activation: Activation) -> str:
        """Why options that are right one by one cannot be right together, or not where and when the compressor is on;
        empty when they can. Shown behind the spec, so it names options."""
        return ""

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        """Why the compressor cannot work in this run, and what to do instead; empty when it can.

        Args:
            point: where it is asked to serve.
            flags: the run's flags by name (``adam_beta1``), resolved.
        """
        return ""

    def tuned_limits(self) -> Mapping[str, tuple[float, float]]:
        """Least and greatest value of each option that is found while the run goes on (``Controller``), by field."""
        return {}


@dataclass(frozen=True)
class Reduced:
    """One step's gradients after their reduction, as a ``Controller`` is shown them.

    Args:
        iteration: 0-based.
        flats: this rank's final gradients, flat, with the loss scale; empty where the step cannot be taken.
        shapes: of this rank's parameters of two or more dimensions.
        scale: the loss scale.
        compressed: whether the compressor was on, and not in its warm-up.
        stage: this rank's pipeline stage.
    """

    iteration: int
    flats: Sequence[Tensor]
    shapes: Sequence[tuple[int, ...]]
    scale: float
    compressed: bool
    stage: int


class Controller(ABC):
    """Decides about options of a compressor while the run goes on.

    Every rank holds one; what it decides from must be equal on all of them, so it comes from sums over the world.
    """

    @abstractmethod
    def after_reduction(self, reduced: Reduced) -> Generator[Request, Tensor, None]:
        """Measures a step's gradients; every rank calls it after every step.

        Yields requests over the world, of small tensors on the CPU. All ranks yield the same.
        """

    @abstractmethod
    def options(self, stage: int) -> Mapping[str, float]:
        """The options of a pipeline stage by field, within ``Compressor.tuned_limits``."""

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """What must survive a restart: plain numbers and lists of them, equal on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse.

        Raises:
            TypeError, ValueError, LookupError, ArithmeticError: for what no run saves; nothing has changed then.
        """


@dataclass(frozen=True)
class SumTraits:
    """What a ``RoundCompressor`` asks of the engines.

    Args:
        batched: the tensor is a stack of k equally shaped parameters (k, *shape), each compressed on its own, and the
            caller asks ``should_compress`` which shapes are worth it and reduces the others exactly. Otherwise the
            tensor is anything, flat buckets included.
        observes: ``observe`` wants the optimizer's update.
        freezes_variance: the optimizer must leave Adam's second moments as they are while the compressor is on.
        clips_first: each replica's gradient is clipped before the sum, not the sum after, as it carries too much noise.
        gathers: each rank is sent what every other one sends, so that bytes and decoding grow with the group.
        index_sets: names of state tensors that are indices into the flattened input.
        steady: names of counters that do not decide which operations run: those that only enter random seeds, say.
    """

    batched: bool = False
    observes: bool = False
    freezes_variance: bool = False
    clips_first: bool = False
    gathers: bool = False
    index_sets: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()


class RoundCompressor(Compressor, ABC):
    """Approximates the sum of one tensor over a group in one or more rounds."""

    traits = SumTraits()

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        """Whether parameters of this shape are worth compressing; the others are reduced exactly."""
        return True

    def controller(self) -> Controller | None:
        """A new controller of the options, where the gradients' reduction tunes them (``dp-grad``, ``embedding``)."""
        return None

    @property
    def finalizes(self) -> bool:
        """Whether ``finalize`` changes what is kept: then all ranks agree before that the gradients are finite."""
        return type(self).finalize is not RoundCompressor.finalize

    def launches(self, state: CompressorState) -> Hashable:
        """What of the state decides which operations the next sum will run, beside options and shapes.

        Where this value was met before, every kernel that the sum needs has been launched before. None says that
        nothing is known: that costs overlap on CUDA, while a value that says too little can hang it.
        """
        return state.layout(self.traits.steady)

    def observe(self, update: Tensor, state: CompressorState) -> None:
        """Takes the update of a step whose sums set the counter ``awaiting``, if ``SumTraits.observes``.

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
            x: contiguous; it belongs to the compressor, which may change it, until ``finalize``.
            state: what this tensor's earlier sums left.
            peers: who sums.

        Every rank of the group must yield the same sequence of operations and shapes; that is a property of the
        algorithm, the caller cannot check it.
        """

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        """Leaves the sum in ``x``. Where it is overridden, all ranks know by then that the gradients are finite.

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


@dataclass(frozen=True)
class CodecTraits:
    """What a ``Codec`` asks of the engines.

    Args:
        exact: a tensor comes back as it was, whatever it holds. The others are handed finite numbers in fp32 (or fp64),
            gradients without the loss scale.
        widened: activations are converted to fp32 (or fp64) first; False for codecs that may send them as they are.
        shared: names of the state that both ends must hold equal; the rest is the sender's own.
        steady: names of counters and memories of samples that do not decide which operations run.
        samples: how many samples each end remembers; more than 0 for a codec that gains from samples that come again,
            and from those alone: it is off in evaluation.
        folders: where it writes to on this machine.
    """

    exact: bool = False
    widened: bool = True
    shared: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()
    samples: int = 0
    folders: tuple[str, ...] = ()


class Codec(Compressor, ABC):
    """Encodes a tensor into one message and back; both ends evolve equal state from equal bytes.

    Messages, inputs, states and results have memory of their own, as each has a holder who may overwrite it: a message
    is on its way when the next one is encoded, error feedback changes what it gave to ``encode``, and layers change
    what was decoded. Two exceptions save copies: the message of an ``exact`` codec may be its input, and the result of
    ``decode`` may lie in the message, which the receiver gives up.
    """

    traits = CodecTraits()

    def should_compress(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether the message of a tensor is smaller than the tensor was in this dtype, before it was widened."""
        return True

    def begin_step(self, state: CompressorState) -> None:  # optional
        """A step begins, of whose messages ``state`` is the sender's."""

    def launches(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        """What of the state and the keys decides which operations a step's messages will run at one of their ends,
        beside options, shape and dtype; see ``RoundCompressor.launches``.

        Args:
            shape: of the tensors.
            state: that end's, before the step.
            keys: of the messages, in their order.
        """
        return state.layout(self.traits.steady)

    @abstractmethod
    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        """A receive buffer for the message of a tensor of this shape and dtype.

        Called once for each message, in the order of the messages; ``key`` names the content that will come.
        """

    def expect(self, shape: torch.Size, state: CompressorState, key: Hashable) -> None:  # optional
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
