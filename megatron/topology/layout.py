"""Arithmetic of ranks: which rank holds which tensor-, data- and pipeline-parallel coordinate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank in the mesh."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh. Ranks count tensor-parallel fastest, then data-parallel, then pipeline stages.

    Args:
        tp: tensor-parallel ranks per stage.
        pp: pipeline stages.
        dp: data-parallel replicas.
        chunks: virtual stages (model chunks) on each pipeline rank.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_virtual_stages(self) -> int:
        """Number of pipeline stages, virtual ones counted."""
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

    def tp_groups(self) -> Iterator[tuple[int, ...]]:
        """Tensor-parallel groups: ranks that share the layers of one stage."""
        for pp in range(self.pp):
            for dp in range(self.dp):
                yield tuple(self.rank_of(tp=t, dp=dp, pp=pp) for t in range(self.tp))

    def dp_groups(self) -> Iterator[tuple[int, ...]]:
        """Data-parallel groups: ranks that hold equal parameters."""
        for pp in range(self.pp):
            for tp in range(self.tp):
                yield tuple(self.rank_of(tp=tp, dp=d, pp=pp) for d in range(self.dp))

    def pp_groups(self) -> Iterator[tuple[int, ...]]:
        """Pipeline-parallel groups: ranks along one pipeline, first stage first."""
        for dp in range(self.dp):
            for tp in range(self.tp):
                yield tuple(self.rank_of(tp=tp, dp=dp, pp=p) for p in range(self.pp))

    def fused_embedding_groups(self) -> Iterator[tuple[int, ...]]:
        """First and last stages of all pipelines of a tensor-parallel rank: every holder of a tied shard."""
        for tp in range(self.tp):
            ends = (0, self.pp - 1)
            yield tuple(self.rank_of(tp=tp, dp=d, pp=pp) for pp in ends for d in range(self.dp))

    def embedding_groups(self) -> Iterator[tuple[int, ...]]:
        """First and last stage of each pipeline: the two holders of a tied embedding shard."""
        for ranks in self.pp_groups():
            yield (ranks[0], ranks[-1])
