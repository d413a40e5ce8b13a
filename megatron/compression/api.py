"""The two interfaces that compressors implement.

``Codec`` serves point-to-point messages and all-gathers: it encodes a tensor into a message and decodes it again.
``RoundCompressor`` serves all-reduces over a group: it is a generator that yields communication requests. Neither ever
sees a process group; the communication points in ``megatron.parallel`` send and count. A compressor declares further
needs in ``SumTraits`` or ``CodecTraits``, or overrides methods. Built-in compressors and plug-ins are treated alike.
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
    "Controller",
    "Level",
    "Op",
    "Payload",
    "Peers",
    "Reduced",
    "Request",
    "RoundCompressor",
    "SampleKey",
    "SumTraits",
    "Trial",
]


@dataclass(frozen=True)
class Aggregate:
    """The result of ``RoundCompressor.rounds``.

    Args:
        total: the (approximate) sum over the group, with the input's shape and dtype if it is a tensor.
        local: this rank's contribution to the sum; error feedback keeps ``input - local``. None means exactly the
            input, which may be overwritten by now.
    """

    total: Tensor | Approximation
    local: Tensor | Approximation | None


class Compressor:
    """Base class of codecs and round compressors: options, and checks of where they can be used."""

    def __init__(self, config: Any = None) -> None:
        """``config`` is an instance of the registered options class."""
        self.config = config

    def problem(self, activation: Activation) -> str:
        """The reason why these options cannot be combined, or do not fit ``activation``; empty if they can be used.
        Shown after the spec, so it names options."""
        return ""

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        """The reason why the compressor cannot be used in this run, and an alternative; empty if it can be used.

        Args:
            point: the point to serve.
            flags: the run's resolved flags by name (``adam_beta1``).
        """
        return ""

    def tuned_limits(self) -> Mapping[str, tuple[float, float]]:
        """Bounds (low, high) of each option that a ``Controller`` tunes during the run, by field."""
        return {}


@dataclass(frozen=True)
class SumTraits:
    """Static properties that a ``RoundCompressor`` declares to the engines.

    Args:
        batched: the tensor is a stack of k parameters of equal shape (k, *shape), each compressed separately. The
            caller asks ``should_compress`` which shapes to compress and reduces the others exactly. If False, the
            tensor may have any shape, including a flat bucket.
        observes: ``observe`` needs the optimizer's update.
        freezes_variance: the optimizer must not change Adam's second moments while the compressor is on.
        clips_first: each replica's gradient is clipped before the all-reduce, because the result is too noisy to clip.
        gathers: some rank receives the messages of all other ranks, so bytes and decoding time grow with the group.
        levels: it makes requests within nodes and between them; the run builds groups for both, and ``Peers.nodes``
            lists the nodes.
        density: share of the elements sent in each step; the others stay in the residual for later steps.
        index_sets: names of state tensors that are indices into the flattened input.
        steady: names of counters that do not affect which operations run, such as counters that only enter seeds.
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
    """Approximate all-reduce of a tensor in several communication rounds."""

    traits = SumTraits()

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        """Whether to compress parameters of this shape; the others are reduced exactly."""
        return True

    def controller(self) -> Controller | None:
        """A new controller if gradient reductions tune the options (``dp-grad``, ``embedding``), else None."""
        return None

    @property
    def finalizes(self) -> bool:
        """Whether ``finalize`` changes state. If so, all ranks first agree that the gradients are finite."""
        return type(self).finalize is not RoundCompressor.finalize

    def launches(self, state: CompressorState) -> Hashable:
        """Key of the kernels that the next reduction launches, besides options and shapes.

        An equal key in an earlier step means that every kernel of the reduction has been launched before. None means
        unknown, which costs overlap on CUDA; an incomplete key can make CUDA hang.
        """
        return state.layout(self.traits.steady)

    def observe(self, update: Tensor, state: CompressorState) -> None:
        """Observe the optimizer's update after a reduction that set the counter ``awaiting``.

        Called only with ``SumTraits.observes``.

        Args:
            update: the optimizer's direction before the learning rate, with weight decay; shaped like the input of
                ``rounds``.
            state: the state of ``rounds``.
        """
        raise NotImplementedError

    @abstractmethod
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        """Yield requests, receive their results, and return the aggregate.

        Args:
            x: this rank's contribution, contiguous; the compressor may change it until ``finalize``.
            state: the state of this tensor.
            peers: the group.

        Every rank of the group must yield the same sequence of operations, levels and shapes. The caller cannot check
        this.
        """

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        """Write the reduced tensor to ``x``. If overridden, all ranks know by then that the gradients are finite.

        Change state as large as ``x`` here, in place (``state.owned``): the step can no longer be skipped, and
        ``stage`` would need memory for the old and the new value.

        Args:
            x: the input of ``rounds``, as ``rounds`` left it.
            aggregate: the result of ``rounds``.
            state, peers: the arguments of ``rounds``.
        """
        write(aggregate.total, x)


@dataclass(frozen=True)
class Payload:
    """A message: ``wire`` is contiguous, and the input's shape and dtype determine its layout."""

    wire: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.wire.numel() * self.wire.element_size()


class SampleKey(tuple[int, ...]):
    """Key of a pipeline message: the ids of its samples, in the order of dimension 1.

    For codecs with ``CodecTraits.tokens`` it also holds the tokens: ``tokens_sb``, int64, for this rank's share of the
    sequence, and ``vocab_size``.
    """

    tokens_sb: Tensor | None = None
    vocab_size: int = 0


@dataclass(frozen=True)
class CodecTraits:
    """Static properties that a ``Codec`` declares to the engines.

    Args:
        exact: the round trip is exact for any values. Other codecs receive finite numbers in fp32 (or fp64), and
            gradients without the loss scale.
        widened: ``encode`` gets activations in fp32 (fp64 in fp64 runs); if False, in the dtype of the run.
        shared: names of state that must be equal at both ends (``NAME.ids`` and ``NAME.rows`` of a sample cache); all
            other state is private to the sender.
        steady: names of counters and sample caches that ``state.layout`` leaves out, because they do not affect which
            operations run or because ``launches`` accounts for them.
        means: pairs of names: a table of means, and the number of observations behind each row. After a change of
            layout, a run starts from the means over all ranks' tables.
        samples: number of samples that each end remembers; above 0 for a codec that only helps when samples repeat, and
            that is therefore off in evaluation.
        samples_in_memory: most remembered samples in memory, the others are in a file; None for all.
        tokens: keys at the pipeline's points hold the samples' tokens (``SampleKey``).
        folders: folders on this machine that the codec writes to.
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
    """Encoder and decoder of messages; both ends derive equal state from equal bytes.

    Messages, inputs, states and results must not share memory, because their holders may overwrite them: a message is
    in flight while the next is encoded, error feedback changes the tensor it passed to ``encode``, and layers change
    the decoded tensor. Two exceptions save copies: the message of an ``exact`` codec may alias its input, and the
    result of ``decode`` may alias the message, which the receiver gives up.
    """

    traits = CodecTraits()

    def should_compress(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a tensor's message is smaller than the tensor in this dtype, its dtype before widening."""
        return True

    def remembered_bytes(self, row: torch.Size) -> int:
        """Bytes of a remembered sample at each end, for tensors with shape ``row`` per sample; see
        ``CodecTraits.samples``."""
        return 0

    def begin_step(self, state: CompressorState) -> None:  # optional
        """Begin a step; ``state`` is the sender's."""

    def launches(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        """Key of the kernels that a step's messages launch at an end, besides options, shape and dtype; see
        ``RoundCompressor.launches``.

        Args:
            shape: shape of the tensors.
            state: state of that end before the step.
            keys: keys of the messages, in order.
        """
        return state.layout(self.traits.steady)

    @abstractmethod
    def empty_payload(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, state: CompressorState, key: Hashable
    ) -> Payload:
        """Allocate a receive buffer for the message of a tensor of this shape and dtype.

        Called once per message, in the order of the messages; ``key`` names the expected content.
        """

    def expect(self, shape: torch.Size, state: CompressorState, key: Hashable) -> None:  # optional
        """Prefetch data for encoding a tensor of this shape under ``key``; changes no state."""

    @abstractmethod
    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        """Encode ``x`` into a message.

        Args:
            x: at the pipeline's points (sequence, samples, hidden), with this rank's share of the sequence under
                sequence parallelism.
            state: the sender's state.
            key: name of the content, for codecs with a memory; at the pipeline's points the sample ids in the order of
                dimension 1 (``SampleKey``).
        """

    @abstractmethod
    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        """Decode a message to a tensor of the given shape and dtype."""

    def reconstruct(self, payload: Payload, x: Tensor, state: CompressorState, key: Hashable) -> Tensor | Approximation:
        """The tensor that the receiver will decode from ``encode``'s message of ``x``; the sender only reads it."""
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
        """Decode ``size`` messages concatenated along dimension 0, and concatenate the results."""
        wires = payloads.wire.view(size, payloads.wire.shape[0] // size, *payloads.wire.shape[1:])
        return torch.cat([self.decode(Payload(wire), shape, dtype, state, key) for wire in wires])
