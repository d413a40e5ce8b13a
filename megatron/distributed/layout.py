"""Rank arithmetic: tensor-, data- and pipeline-parallel coordinates of ranks, and groups of ranks."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Tie(enum.Enum):
    """An embedding with copies on several pipeline stages, which sum its gradients."""

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
    """Sizes of the mesh. In rank order, tensor-parallel coordinates vary fastest, then data-parallel, then pipeline.

    Args:
        tp: tensor-parallel ranks per stage.
        pp: pipeline stages.
        dp: data-parallel replicas.
        chunks: virtual stages (model chunks) on each pipeline rank.
        decoder: stage at which the decoder of an encoder-decoder begins; 0 if not at a later stage.
        distances: whether all stages hold an embedding of the distances between tokens.
        ep: neighboring replicas that share the experts of each layer; it divides ``dp``.
        folded: experts are also distributed over tensor-parallel ranks, each of which holds whole experts: ``ep``
            counts these ranks, is a multiple of ``tp`` and divides ``tp * dp`` (Liu et al. 2025, parallel folding).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1
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
        """Position in the model of chunk ``chunk`` on pipeline rank ``pp``."""
        return chunk * self.pp + pp

    def follows_encoder(self, virtual_stage: int) -> bool:
        """Whether a stage holds layers of a decoder with its encoder on earlier stages."""
        return 0 < self.decoder <= virtual_stage

    def holders(self, tie: Tie) -> tuple[int, ...]:
        """Stages that hold a tied embedding, in order: the input's, a decoder's input's and the output's, or all."""
        if tie is Tie.DISTANCES:
            return tuple(range(self.pp)) if self.distances else (0,)
        inputs = {0, self.decoder}
        return tuple(sorted(inputs | {self.pp - 1} if tie is Tie.WORDS else inputs))

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The embeddings held by several stages."""
        return tuple(tie for tie in Tie if len(self.holders(tie)) > 1)

    def tp_groups(self) -> Iterator[tuple[int, ...]]:
        """Tensor-parallel groups: ranks that share the layers of a stage."""
        for pp in range(self.pp):
            for dp in range(self.dp):
                yield tuple(self.rank_of(tp=t, dp=dp, pp=pp) for t in range(self.tp))

    def dp_groups(self) -> Iterator[tuple[int, ...]]:
        """Data-parallel groups: ranks that hold equal parameters."""
        for pp in range(self.pp):
            for tp in range(self.tp):
                yield tuple(self.rank_of(tp=tp, dp=d, pp=pp) for d in range(self.dp))

    def ep_groups(self) -> Iterator[tuple[int, ...]]:
        """Expert-parallel groups: ranks that share the experts of each layer."""
        for ranks in self._holding_experts():
            for first in range(0, len(ranks), self.ep):
                yield ranks[first : first + self.ep]

    def expert_dp_groups(self) -> Iterator[tuple[int, ...]]:
        """Groups of ranks that hold equal experts."""
        for ranks in self._holding_experts():
            for first in range(self.ep):
                yield ranks[first :: self.ep]

    def _holding_experts(self) -> Iterator[tuple[int, ...]]:
        """Groups of ranks that together hold the same experts, or the same parts of them."""
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
        """Holders of a tied embedding in all pipelines of a tensor-parallel rank: every holder of a tied shard."""
        for tp in range(self.tp):
            yield tuple(self.rank_of(tp=tp, dp=d, pp=pp) for pp in self.holders(tie) for d in range(self.dp))

    def embedding_groups(self, tie: Tie = Tie.WORDS) -> Iterator[tuple[int, ...]]:
        """Holders of a tied embedding in each pipeline."""
        for ranks in self.pp_groups():
            yield tuple(ranks[stage] for stage in self.holders(tie))
