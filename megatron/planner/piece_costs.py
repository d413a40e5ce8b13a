"""Costs of a piece's forward and backward passes, of its gradient reduction, and of a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.parallel.data.buffer import NamedParam
from megatron.planner.dry_run import Collective, Tally


@dataclass(frozen=True)
class ReductionCost:
    """Cost of reducing a piece's gradients over two replicas.

    Args:
        rounds: collectives of each round; the bytes do not depend on the number of replicas.
        coding_s: time of encoding and decoding.
        first_coding_s: the part of ``coding_s`` before the first round.
        state_bytes: bytes of the compressors' state.
    """

    rounds: tuple[tuple[Collective, ...], ...] = ()
    coding_s: float = 0.0
    first_coding_s: float = 0.0
    state_bytes: float = 0.0


@dataclass(frozen=True)
class PieceCost:
    """Costs of a piece of the model on a tensor-parallel rank.

    Args:
        forward, backward: costs of one micro-batch.
        saved_bytes: bytes kept from the forward to the backward of a micro-batch.
        working_bytes: temporary bytes during computation, independent of the number of micro-batches and without
            recomputation.
        parameters: number of parameters.
        own_parameters: number of expert parameters that not all replicas hold.
        partial: number of parameters whose gradients are all-reduced over tensor-parallel ranks once a step
            (sequence parallelism).
        tied_shape: shape of this rank's part of the tied embedding; empty if the piece holds none.
        params: the parameters in forward order, on the meta device in a dry run.
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
    """Cost of a message through a codec.

    Args:
        nbytes: bytes on the wire.
        encode_s, decode_s: time of encoding and decoding.
        kept_bytes: bytes of state at sender and receiver together, independent of the samples.
        sample_bytes: bytes that each end keeps per remembered sample.
    """

    nbytes: float
    encode_s: float
    decode_s: float
    kept_bytes: float = 0.0
    sample_bytes: float = 0.0
