"""Costs of the pieces of a step: of a piece's passes, of its gradients' reduction, and of a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.parallel.data.buffer import NamedParam
from megatron.planner.dry_run import Collective, Tally


@dataclass(frozen=True)
class ReductionCost:
    """The cost of reducing a piece's gradients over two replicas.

    Args:
        rounds: collectives of each round; the bytes do not depend on the number of replicas.
        coding_s: time of encoding and decoding.
        first_coding_s: the part of it before the first round.
        state_bytes: bytes of the compressors' state.
    """

    rounds: tuple[tuple[Collective, ...], ...] = ()
    coding_s: float = 0.0
    first_coding_s: float = 0.0
    state_bytes: float = 0.0


@dataclass(frozen=True)
class PieceCost:
    """The costs of a piece of the model on one tensor-parallel rank.

    Args:
        forward, backward: costs of one micro-batch.
        saved_bytes: bytes kept from the forward to the backward of a micro-batch.
        working_bytes: bytes needed at once while it is computed, whatever the number of micro-batches; without those of
            recomputing.
        parameters: number of parameters.
        own_parameters: those of these that not all replicas hold: of experts.
        partial: elements of these whose gradients are all-reduced over tensor-parallel ranks once a step
            (sequence parallelism).
        tied_shape: shape of the tied embedding's part, where the piece holds one.
        params: the parameters, on the meta device where nothing is measured, in the order of the forward pass.
    """

    forward: Tally
    backward: Tally
    saved_bytes: float
    working_bytes: float
    parameters: int
    own_parameters: int = 0
    partial: int = 0
    tied_shape: tuple[int, ...] = ()
    params: Sequence[NamedParam] = ()


@dataclass(frozen=True)
class MessageCost:
    """The cost of one message through a codec.

    Args:
        nbytes: bytes on the wire.
        encode_s, decode_s: time of encoding and decoding at its ends.
        kept_bytes: bytes that its sender and its receiver together keep, whatever the samples.
        sample_bytes: bytes that each end keeps for each sample that it remembers.
    """

    nbytes: float
    encode_s: float
    decode_s: float
    kept_bytes: float = 0.0
    sample_bytes: float = 0.0
