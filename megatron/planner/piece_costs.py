"""Pieces of a model (the embedding, each kind of layer, and the head), and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.config.model import ModelConfig
from megatron.parallel.data.buffer import NamedParam
from megatron.planner.dry_run import Collective, CostTally

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"
EXPERTS = "experts"
"""First word of the name of a layer with experts, followed by their number: "experts 8"."""


def piece_of(model: ModelConfig, layer: int) -> str:
    """Name of a layer's piece."""
    count = model.expert_layers.get(layer)
    name = LAYER if count is None else f"{EXPERTS} {count}"
    return f"{name} window" if model.window_attn_skip_freq and model.window_of(layer) is not None else name


def pieces_of(model: ModelConfig) -> tuple[str, ...]:
    """Distinct names of a model's pieces."""
    return (EMBEDDING, *dict.fromkeys(piece_of(model, layer) for layer in range(model.num_layers)), HEAD)


def kind_of(name: str) -> str:
    """Kind of a piece, as named in corrections."""
    return name.split()[0]


@dataclass(frozen=True)
class ReductionCost:
    """Cost of reducing a piece's gradients over replicas.

    Args:
        rounds: collectives of each round.
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
        weight: the part of ``backward`` that a weight pass computes, if the schedule has weight passes.
        recorded_bytes: bytes kept from the backward to the weight pass of a micro-batch.
        saved_bytes: bytes kept from the forward to the backward of a micro-batch.
        working_bytes: temporary bytes during computation, independent of the number of micro-batches and without
            recomputation.
        parameters: number of parameters.
        unshared_expert_parameters: number of expert parameters that not all replicas hold.
        partial: number of parameters whose gradients are all-reduced over tensor-parallel ranks once a step
            (sequence parallelism).
        tied_shape: shape of this rank's part of the tied embedding; empty if the piece holds none.
        params: the parameters in forward order, on the meta device in a dry run.
    """

    forward: CostTally
    backward: CostTally
    weight: CostTally
    recorded_bytes: float
    saved_bytes: float
    working_bytes: float
    parameters: int
    unshared_expert_parameters: int = 0
    partial: int = 0
    tied_shape: tuple[int, ...] = ()
    params: Sequence[NamedParam] = ()

    def with_coding(self, factor: float) -> PieceCost:
        """Costs with encoding and decoding that takes ``factor`` times as long."""
        forward, backward, weight = (
            replace(tally, coding_s=tally.coding_s * factor) for tally in (self.forward, self.backward, self.weight)
        )
        return replace(self, forward=forward, backward=backward, weight=weight)

    def with_changes(self, changed: Sequence[PieceCost]) -> PieceCost:
        """Costs with several compressors, from the costs with each of them alone.

        Compressors of different points replace different operations, so their changes add up.
        """
        return replace(
            self,
            **{
                name: getattr(self, name).with_changes([getattr(cost, name) for cost in changed])
                for name in ("forward", "backward", "weight")
            },
            **{
                name: getattr(self, name) + sum(getattr(cost, name) - getattr(self, name) for cost in changed)
                for name in ("recorded_bytes", "saved_bytes", "working_bytes")
            },
        )


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
