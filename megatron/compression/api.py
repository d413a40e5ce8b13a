"""Interfaces of compressors.

``Codec`` serves point-to-point messages and all-gathers: it encodes a tensor into a message and decodes it again.
``RoundCompressor`` serves all-reduces over a group: its ``rounds`` is a generator of communication requests.
Compressors never see a process group; ``megatron.parallel`` sends their messages and counts the bytes. A compressor
declares requirements in ``SumTraits`` or ``CodecTraits``. Built-in compressors and plug-ins use the same interfaces.
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
    """Result of ``RoundCompressor.rounds``.

    Args:
        total: the (approximate) sum over the group; a tensor has the input's shape and dtype.
        local: this rank's contribution to the sum; error feedback keeps ``input - local``. None means that the
            contribution is exactly the input, even if the input has been overwritten since.
    """

    total: Tensor | Approximation
    local: Tensor | Approximation | None


class Compressor:
    """Base class of codecs and round compressors."""

    def __init__(self, config: Any = None) -> None:
        """``config`` is an instance of the registered options class."""
        self.config = config

    def problem(self, activation: Activation) -> str:
        """Error message for options that cannot be combined or do not fit ``activation``; empty without an error.
        The message appears after the spec, so it needs to name only the options."""
        return ""

    def check(self, point: Point, flags: Mapping[str, Any]) -> str:
        """Error message, with the fix, for a compressor that cannot be used in this run; empty without an error.

        Args:
            point: the point to serve.
            flags: values of all flags of the run, by name (``adam_beta1``).
        """
        return ""

    def tuned_limits(self) -> Mapping[str, tuple[float, float]]:
        """Bounds (low, high) of options that a ``Controller`` tunes during the run, by field."""
        return {}


@dataclass(frozen=True)
class SumTraits:
    """Static properties that a ``RoundCompressor`` declares to the engines.

    Args:
        batched: the input is a stack of k parameters of equal shape (k, *shape), each compressed separately. The
            caller asks ``should_compress`` for each shape, and reduces other parameters exactly. If False, the input
            may have any shape, and may be a flat bucket.
        observes: ``observe`` needs the optimizer's update.
        freezes_variance: Adam's second moments must stay unchanged while the compressor is on.
        clips_first: each replica clips its gradient before the all-reduce, because the result is too noisy to clip.
        gathers: some rank receives the messages of all other ranks, so bytes and decoding time grow with the group.
        levels: requests name a level, inside or between nodes; the run builds groups for both levels, and
            ``Peers.nodes`` lists the nodes.
        density: share of the elements sent in each step; other elements stay in the residual for later steps.
        index_sets: names of state tensors that hold indices into the flattened input.
        steady: names of counters that do not affect which operations run, such as counters for random seeds.
        scales_residual: ``rounds`` scales the residual in its input, to which error feedback must have added all of it.
        quantizes: every number is rounded. ``--compress auto`` bounds the error of such compressors in gradients.
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
    scales_residual: bool = False
    quantizes: bool = False


class RoundCompressor(Compressor, ABC):
    """Approximate all-reduce of a tensor in several communication rounds."""

    traits = SumTraits()

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        """Whether to compress parameters of this shape; other parameters are reduced exactly."""
        return True

    def controller(self) -> Controller | None:
        """Create the controller that tunes options by reduced gradients (``dp-grad``, ``embedding``), if any."""
        return None

    @property
    def finalizes(self) -> bool:
        """Whether ``finalize`` is overridden. If so, all ranks check that gradients are finite before it runs."""
        return type(self).finalize is not RoundCompressor.finalize

    def launch_signature(self, state: CompressorState) -> Hashable:
        """Signature of the kernels that the next reduction launches, in addition to options and shapes.

        If an earlier step had an equal signature, every kernel of the reduction has been launched before. None means
        unknown, which prevents overlap on CUDA; an incomplete signature can make CUDA hang.
        """
        return state.layout(self.traits.steady)

    def observe(self, update: Tensor, state: CompressorState) -> None:
        """Receive the optimizer's update after a reduction that set the counter ``awaiting``.

        Called only with ``SumTraits.observes``.

        Args:
            update: the optimizer's direction before the learning rate, with weight decay; shaped like the input of
                ``rounds``.
            state: the state of ``rounds``.
        """
        raise NotImplementedError

    @abstractmethod
    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        """Generator that yields requests, receives their results, and returns the aggregate.

        Args:
            x: this rank's input, contiguous. The compressor may overwrite it, except if it returns ``Aggregate.local``:
                error feedback keeps ``x - local``.
            state: state for this tensor.
            peers: ranks of the group.

        All ranks of the group must yield the same sequence of operations, levels and shapes. The caller does not check.
        """

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        """Write the reduced tensor to ``x``. Before an override runs, all ranks know that the gradients are finite.

        Update large state here, in place (``state.buffer``): the step can no longer be skipped, and ``stage`` would
        keep the old and the new value in memory.

        Args:
            x: the input of ``rounds``, with any changes by ``rounds``.
            aggregate: the result of ``rounds``.
            state, peers: the arguments of ``rounds``.
        """
        write(aggregate.total, x)


@dataclass(frozen=True)
class Payload:
    """A message. ``wire`` is contiguous; shape and dtype of the input determine its layout."""

    wire: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.wire.nbytes


class SampleKey(tuple[int, ...]):
    """Key of a pipeline message: sample ids in the order of dimension 1.

    With ``CodecTraits.tokens`` it also holds ``tokens_sb``, the int64 tokens of this rank's share of the sequence, and
    ``vocab_size``.
    """

    tokens_sb: Tensor | None = None
    vocab_size: int = 0


@dataclass(frozen=True)
class CodecTraits:
    """Static properties that a ``Codec`` declares to the engines.

    Args:
        exact: decoding restores any input exactly. Other codecs receive finite numbers in fp32 (or fp64), and
            gradients without the loss scale.
        widened: ``encode`` receives activations in fp32 (fp64 in fp64 runs); if False, in the dtype of the run.
        shared: names of state tensors that sender and receiver must hold in equal copies (``NAME.ids`` and
            ``NAME.rows`` of a sample cache); all other state is private to the sender.
        steady: names of counters and sample caches that ``state.layout`` leaves out, because they do not affect which
            operations run, or because ``launch_signature`` accounts for them.
        means: pairs of names of state tensors: a table of means, and the number of observations behind each row. After
            a change of layout, a run starts from the mean over all ranks' tables.
        samples: number of samples that sender and receiver each remember. A codec with remembered samples only helps
            when samples repeat, and is therefore off in evaluation.
        samples_in_memory: maximum number of remembered samples in memory, with more in a file; None for all.
        tokens: whether the keys of pipeline messages must hold the samples' tokens (``SampleKey``).
        folders: local folders that the codec writes to.
        quantizes: as in ``SumTraits``.
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
    quantizes: bool = False


class Codec(Compressor, ABC):
    """Encoder and decoder of messages. Sender and receiver derive equal state from equal bytes.

    Messages, inputs, states and results must not share memory, because callers may overwrite them: a message is in
    flight while the next message is encoded, error feedback changes the tensor after ``encode``, and layers change the
    decoded tensor. Two exceptions save copies: the message of an ``exact`` codec may alias its input, and the result of
    ``decode`` may alias the message, since the receiver does not use the message again.
    """

    traits = CodecTraits()

    def should_compress(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a tensor's message is smaller than the tensor. ``dtype`` is the dtype before widening."""
        return True

    def remembered_bytes(self, row: torch.Size) -> int:
        """Bytes of a remembered sample at each end (``CodecTraits.samples``), with shape ``row`` per sample."""
        return 0

    def begin_step(self, state: CompressorState) -> None:  # optional
        """Begin a step; ``state`` is the sender's."""

    def launch_signature(self, shape: torch.Size, state: CompressorState, keys: Sequence[Hashable]) -> Hashable:
        """Signature of the kernels that a step's messages launch at an end, in addition to options, shape and dtype;
        see ``RoundCompressor.launch_signature``.

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

        Called once per message, in the order of the messages, with the key of the expected message.
        """

    def expect(self, shape: torch.Size, state: CompressorState, key: Hashable) -> None:  # optional
        """Prefetch data for encoding a tensor of this shape under ``key``, without a change of state."""

    @abstractmethod
    def encode(self, x: Tensor, state: CompressorState, key: Hashable) -> Payload:
        """Encode ``x`` into a message.

        Args:
            x: the input; at pipeline points (sequence, samples, hidden), with this rank's share of the sequence under
                sequence parallelism.
            state: the sender's state.
            key: name of the content, for codecs that remember samples; a ``SampleKey`` at pipeline points.
        """

    @abstractmethod
    def decode(
        self, payload: Payload, shape: torch.Size, dtype: torch.dtype, state: CompressorState, key: Hashable
    ) -> Tensor:
        """Decode a message to a tensor of this shape and dtype."""

    def reconstruct(self, payload: Payload, x: Tensor, state: CompressorState, key: Hashable) -> Tensor | Approximation:
        """The receiver's result of decoding the message of ``x``. The sender does not modify it."""
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
