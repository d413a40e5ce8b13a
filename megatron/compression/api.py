"""The two contracts that a compressor author needs.

``Codec`` serves point-to-point messages and all-gathers: one tensor in, one message out, and back.
``RoundCompressor`` serves all-reduces over a group: a generator that yields what it wants communicated. Neither ever
sees a process group; the communication points in ``megatron.comm`` do the sending and the counting. What a compressor
needs beyond that it declares (``SumTraits``, ``CodecTraits``) or overrides; built-in and plug-in are served alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.compression.approximation import Approximation, write
from megatron.compression.controller import Controller, Reduced, Trial
from megatron.compression.points import Point
from megatron.compression.requests import Level, Op, Peers, Request
from megatron.compression.schedule import Activation
from megatron.compression.state import CompressorState

__all__ = [
    "Aggregate",
    "Codec",
    "CodecTraits",
    "Compressor",
    "Content",
    "Controller",
    "Level",
    "Op",
    "Payload",
    "Peers",
    "Reduced",
    "Request",
    "RoundCompressor",
    "SumTraits",
    "Trial",
]


@dataclass(frozen=True)
class Aggregate:
    """The result of ``RoundCompressor.rounds``.

    Args:
        total: the (approximate) sum over the group, with the input's shape and dtype where it is a tensor.
        local: what this rank contributed to that sum; error feedback keeps ``input - local``. None stands for
            exactly the input, which may be overwritten by now.
    """

    total: Tensor | Approximation
    local: Tensor | Approximation | None


class Compressor:
    """The base of codecs and round compressors: options, and checks of where they can work."""

    def __init__(self, config: Any = None) -> None:
        """``config`` is an instance of the registered options class."""
        self.config = config

    def problem(self, activation: Activation) -> str:
        """The reason why these options cannot be combined, or not where and when it is on; empty when they can.
        Shown behind the spec, so it names options."""
        return ""

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        """The reason why the compressor cannot work in this run, and what to do instead; empty when it can.

        Args:
            point: the point that it is asked to serve.
            flags: the run's flags by name (``adam_beta1``), resolved.
        """
        return ""

    def tuned_limits(self) -> Mapping[str, tuple[float, float]]:
        """Least and greatest value of each option that a ``Controller`` tunes during the run, by field."""
        return {}


@dataclass(frozen=True)
class SumTraits:
    """What a ``RoundCompressor`` declares to the engines.

    Args:
        batched: the tensor is a stack of k equally shaped parameters (k, *shape), each compressed on its own, and the
            caller asks ``should_compress`` which shapes are worth it and reduces the others exactly. Otherwise the
            tensor is anything, flat buckets included.
        observes: ``observe`` wants the optimizer's update.
        freezes_variance: the optimizer must leave Adam's second moments as they are while the compressor is on.
        clips_first: each replica's gradient is clipped before the all-reduce, whose result carries too much noise.
        gathers: some rank receives what every other one sends, so that bytes and decoding grow with the group.
        levels: it makes requests within nodes and between them, so that the run builds groups for these, and
            ``Peers.nodes`` names them.
        density: share of the numbers that a step sends, where the others wait in the residual for steps to come.
        index_sets: names of state tensors that are indices into the flattened input.
        steady: names of counters that do not decide which operations run: such as those that only enter random seeds.
    """

    batched: bool = False
    observes: bool = False
    freezes_variance: bool = False
    clips_first: bool = False
    gathers: bool = False
    levels: bool = False
    density: float = 1.0
    index_sets: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()


class RoundCompressor(Compressor, ABC):
    """Approximates the all-reduce of one tensor in one or more rounds."""

    traits = SumTraits()

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        """Whether parameters of this shape are worth compressing; the others are reduced exactly."""
        return True

    def controller(self) -> Controller | None:
        """A new controller of the options, where the gradients' reduction tunes them (``dp-grad``, ``embedding``)."""
        return None

    @property
    def finalizes(self) -> bool:
        """Whether ``finalize`` changes state: then all ranks first agree that the gradients are finite."""
        return type(self).finalize is not RoundCompressor.finalize

    def launches(self, state: CompressorState) -> Hashable:
        """A key of the kernels that the next reduction launches, beside options and shapes.

        If this key has been met before, every kernel that the reduction needs has been launched before. None stands
        for an unknown key, which costs overlap on CUDA, while a key that leaves something out can hang it.
        """
        return state.layout(self.traits.steady)

    def observe(self, update: Tensor, state: CompressorState) -> None:
        """Takes the update of a step whose reduction set the counter ``awaiting``, if ``SumTraits.observes``.

        Args:
            update: the optimizer's direction, weight decay included, whatever the learning rate; shaped like the input
                of ``rounds``.
            state: the state of ``rounds``.
        """
        raise NotImplementedError

    @abstractmethod
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        """Yields requests, receives their results, and returns the aggregate.

        Args:
            x: this rank's contribution, contiguous; the compressor may change it, until ``finalize``.
            state: the state of this tensor.
            peers: the group.

        Every rank of the group must yield the same sequence of operations, levels and shapes; that is a property of the
        algorithm, the caller cannot check it.
        """

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        """Leaves the reduced tensor in ``x``. If overridden, all ranks know by then that the gradients are finite.

        State as large as ``x`` is changed here, in place (``state.owned``), as there is no way back from this point;
        ``stage`` would need room for both its old and its new value.

        Args:
            x: the input of ``rounds``, as ``rounds`` left it.
            aggregate: the result of ``rounds``.
            state, peers: the arguments of ``rounds``.
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


class Content(tuple[int, ...]):
    """Key of a pipeline message: the ids of its samples, in the order of dimension 1.

    Where a codec asks for them (``CodecTraits.tokens``) it holds their tokens as well: ``tokens_sb``, int64, of this
    rank's share of the sequence, and ``vocab_size``, the entries of the vocabulary.
    """

    tokens_sb: Tensor | None = None
    vocab_size: int = 0


@dataclass(frozen=True)
class CodecTraits:
    """What a ``Codec`` declares to the engines.

    Args:
        exact: a tensor comes back as it was, whatever it holds. The others are handed finite numbers in fp32 (or fp64),
            gradients without the loss scale.
        widened: ``encode`` gets activations in fp32 (fp64 in fp64 runs); if False, in the dtype of the run.
        shared: names of the state that both ends must hold equal (``NAME.ids`` and ``NAME.rows`` of a memory of
            samples); the rest is the sender's own.
        steady: names of counters and memories of samples that ``state.layout`` leaves out: those that do not decide
            which operations run, and those that ``launches`` accounts for itself.
        means: names of tables of means and of their counts: a row is the mean of as many things that a rank has seen as
            its count says. Another layout begins at the means of all ranks' tables.
        samples: how many samples each end remembers; more than 0 for a codec that gains from samples that come again,
            and from those alone: it is off in evaluation.
        samples_in_memory: how many of them at most are in memory, the others in a file; None for all.
        tokens: keys at the pipeline's points hold the samples' tokens (``Content``).
        folders: where it writes to on this machine.
    """

    exact: bool = False
    widened: bool = True
    shared: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()
    means: tuple[tuple[str, str], ...] = ()
    samples: int = 0
    samples_in_memory: int | None = None
    tokens: bool = False
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

    def remembered_bytes(self, row: torch.Size) -> int:
        """Bytes that a remembered sample takes at each end, for a tensor of ``row`` a sample; see
        ``CodecTraits.samples``."""
        return 0

    def begin_step(self, state: CompressorState) -> None:  # optional
        """Begins a step; ``state`` is that of the sender's end."""

    def launches(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        """A key of the kernels that a step's messages launch at one of their ends, beside options, shape and dtype; see
        ``RoundCompressor.launches``.

        Args:
            shape: shape of the tensors.
            state: state of that end, before the step.
            keys: keys of the messages, in their order.
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
        """Announces that such a tensor will be encoded under ``key``, to prefetch what that needs; changes nothing."""

    @abstractmethod
    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        """Turns ``x`` into a message.

        Args:
            x: at the pipeline's points (sequence, samples, hidden), where the sequence is this rank's share of it under
                sequence parallelism.
            state: the sender's state.
            key: names the content, for codecs with a memory: at the pipeline's points a tuple of the samples' ids
                (int), in the order of dimension 1 (``Content``).
        """

    @abstractmethod
    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        """Turns a message back into a tensor of the given shape and dtype."""

    def reconstruct(self, payload: Payload, x: Tensor, state: CompressorState, key: Hashable) -> Tensor | Approximation:
        """The tensor that ``encode``'s message of ``x`` decodes to; called by the sender, which only reads it."""
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
        """Decodes ``size`` messages that are concatenated along dimension 0, and concatenates the results."""
        wires = payloads.wire.view(size, payloads.wire.shape[0] // size, *payloads.wire.shape[1:])
        return torch.cat([self.decode(Payload(wire), shape, dtype, state, key) for wire in wires])
