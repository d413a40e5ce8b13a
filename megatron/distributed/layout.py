"""Rank arithmetic: tensor-, data- and pipeline-parallel coordinates of ranks, and groups of ranks."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Tie(enum.Enum):
    """An embedding with copies on several pipeline stages, which sum their gradients."""

    WORDS = "embedding"
    POSITIONS = "position embedding"
    DISTANCES = "embedding of distances"


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank in the mesh."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh. In rank order, the tensor-parallel coordinate varies fastest and the pipeline stage slowest.

    Args:
        tp: tensor-parallel ranks per stage.
        pp: pipeline stages.
        dp: data-parallel replicas.
        chunks: virtual stages (model chunks) on each pipeline rank.
        v_shaped: whether the virtual stages of every second chunk run back from the last rank to the first; otherwise
            those of all chunks run from the first rank to the last.
        decoder: first stage of the decoder in an encoder-decoder model; 0 if it is the first stage or there is none.
        distances: whether every stage holds an embedding of token distances.
        ep: neighboring replicas that share the experts of each layer; it divides ``dp``.
        folded: whether experts are distributed over tensor-parallel ranks, too, and no expert is split (parallel
            folding, Liu et al. 2025). ``ep`` then includes these ranks: it is a multiple of ``tp`` and divides
            ``tp * dp``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1
    v_shaped: bool = False
    decoder: int = 0
    distances: bool = False
    ep: int = 1
    folded: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_virtual_stages(self) -> int:
        """Number of pipeline stages, including virtual stages."""
        return self.pp * self.chunks

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a global rank."""
        return Coordinates(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank_of(self, *, tp: int, dp: int, pp: int) -> int:
        """Global rank at the coordinates."""
        return (pp * self.dp + dp) * self.tp + tp

    def virtual_stage(self, pp: int, chunk: int) -> int:
        """Virtual stage of chunk ``chunk`` on pipeline rank ``pp``."""
        return chunk * self.pp + (self.pp - 1 - pp if self.v_shaped and chunk % 2 else pp)

    def place_of(self, virtual_stage: int) -> tuple[int, int]:
        """Pipeline rank and chunk of a virtual stage."""
        chunk, position = divmod(virtual_stage, self.pp)
        return (self.pp - 1 - position if self.v_shaped and chunk % 2 else position), chunk

    def virtual_stages(self, pp: int) -> tuple[int, ...]:
        """Virtual stages on a pipeline rank, by chunk."""
        return tuple(self.virtual_stage(pp, chunk) for chunk in range(self.chunks))

    def ends_of(self, boundary: int, forward: bool) -> tuple[int, int]:
        """Pipeline ranks that send and receive over the boundary after a virtual stage; equal at the turn of a V."""
        lower, upper = self.place_of(boundary)[0], self.place_of(boundary + 1)[0]
        return (lower, upper) if forward else (upper, lower)

    def crosses(self, boundary: int) -> bool:
        """Whether a boundary's activations are messages: its virtual stages are on different pipeline ranks."""
        sender, receiver = self.ends_of(boundary, True)
        return sender != receiver

    def follows_encoder(self, virtual_stage: int) -> bool:
        """Whether a stage holds decoder layers and the encoder is on earlier stages."""
        return 0 < self.decoder <= virtual_stage

    def holders(self, tie: Tie) -> tuple[int, ...]:
        """Pipeline ranks with a copy of a tied embedding, in order: those with encoder input, decoder input and output,
        or all. Chunks of a rank share a copy."""
        if tie is Tie.DISTANCES:
            return tuple(range(self.pp)) if self.distances else (0,)
        inputs = {0, self.decoder}
        output, _ = self.place_of(self.num_virtual_stages - 1)
        return tuple(sorted(inputs | {output} if tie is Tie.WORDS else inputs))

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Embeddings with copies on several stages."""
        return tuple(tie for tie in Tie if len(self.holders(tie)) > 1)

    def tp_groups(self) -> Iterator[tuple[int, ...]]:
        """Tensor-parallel groups: ranks that share the layers of a stage."""
        for pp in range(self.pp):
            for dp in range(self.dp):
                yield tuple(self.rank_of(tp=t, dp=dp, pp=pp) for t in range(self.tp))

    def dp_groups(self) -> Iterator[tuple[int, ...]]:
        """Data-parallel groups: ranks with equal parameters."""
        for pp in range(self.pp):
            for tp in range(self.tp):
                yield tuple(self.rank_of(tp=tp, dp=d, pp=pp) for d in range(self.dp))

    def ep_groups(self) -> Iterator[tuple[int, ...]]:
        """Expert-parallel groups: ranks that share the experts of each layer."""
        for ranks in self._expert_holder_groups():
            for first in range(0, len(ranks), self.ep):
                yield ranks[first : first + self.ep]

    def expert_dp_groups(self) -> Iterator[tuple[int, ...]]:
        """Groups of ranks with equal experts."""
        for ranks in self._expert_holder_groups():
            for first in range(self.ep):
                yield ranks[first :: self.ep]

    def _expert_holder_groups(self) -> Iterator[tuple[int, ...]]:
        """Groups of ranks that hold the same experts, or the same tensor-parallel shards of them."""
        if not self.folded:
            yield from self.dp_groups()
            return
        stage = self.tp * self.dp
        for pp in range(self.pp):
            yield tuple(range(pp * stage, (pp + 1) * stage))

    def pp_groups(self) -> Iterator[tuple[int, ...]]:
        """Pipeline-parallel groups: ranks along a pipeline, first stage first."""
        for dp in range(self.dp):
            for tp in range(self.tp):
                yield tuple(self.rank_of(tp=tp, dp=dp, pp=p) for p in range(self.pp))

    def fused_embedding_groups(self, tie: Tie = Tie.WORDS) -> Iterator[tuple[int, ...]]:
        """Ranks with a copy of a tied embedding, in all pipelines with the same tensor-parallel rank."""
        for tp in range(self.tp):
            yield tuple(self.rank_of(tp=tp, dp=d, pp=pp) for pp in self.holders(tie) for d in range(self.dp))

    def embedding_groups(self, tie: Tie = Tie.WORDS) -> Iterator[tuple[int, ...]]:
        """Ranks with a copy of a tied embedding, for each pipeline."""
        for ranks in self.pp_groups():
            yield tuple(ranks[stage] for stage in self.holders(tie))
