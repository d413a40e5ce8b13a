"""Communication points. All network traffic belongs to a point."""

from __future__ import annotations

import enum


class Point(enum.Enum):
    """Communication points, named as on the command line and in logs."""

    PP_FWD = "pp-forward"
    """Activations sent to the next stage."""
    PP_BWD = "pp-backward"
    """Activation gradients sent to the previous stage."""
    DP_GRAD = "dp-grad"
    """Gradient all-reduce over data-parallel replicas."""
    EMBED_GRAD = "embedding"
    """All-reduce of tied embeddings' gradients over the stages that hold them."""
    TP_FWD = "tp-forward"
    """Tensor- and sequence-parallel collectives of the forward pass."""
    TP_BWD = "tp-backward"
    """Tensor- and sequence-parallel collectives of the backward pass."""
    EP_DISPATCH_FWD = "ep-dispatch-forward"
    """Tokens sent to the ranks of their experts."""
    EP_DISPATCH_BWD = "ep-dispatch-backward"
    """Gradients of these tokens, sent back."""
    EP_COMBINE_FWD = "ep-combine-forward"
    """Expert outputs, sent back to the tokens' ranks."""
    EP_COMBINE_BWD = "ep-combine-backward"
    """Gradients of expert outputs, sent to the experts' ranks."""
    PARAM_GATHER = "param-gather"
    """All-gather of parameters after the sharded optimizer's update."""
    OPTIMIZER = "optimizer"
    """Shards of matrices for optimizers that need complete matrices, and their updates. Never compressed."""
    OUTER = "outer"
    """Pseudo-gradients of islands at the end of a round; gradients while islands synchronize every step."""
    CONTROL = "control"
    """Scalars: norms, losses, finite checks. Never compressed."""

    @property
    def is_reduction(self) -> bool:
        """Whether the point carries all-reduces or reduce-scatters, not messages or all-gathers."""
        return self in (Point.DP_GRAD, Point.EMBED_GRAD, Point.TP_FWD, Point.TP_BWD, Point.OUTER)

    @property
    def forward(self) -> bool:
        """Whether the point also has traffic in evaluation."""
        return self in (Point.PP_FWD, Point.TP_FWD, Point.EP_DISPATCH_FWD, Point.EP_COMBINE_FWD)

    @property
    def carries_gradients(self) -> bool:
        """Whether the point carries gradients of a step: of parameters, or of activations in the backward pass."""
        backward = (Point.PP_BWD, Point.TP_BWD, Point.EP_DISPATCH_BWD, Point.EP_COMBINE_BWD)
        return self in (Point.DP_GRAD, Point.EMBED_GRAD, *backward)

    @property
    def is_expert_point(self) -> bool:
        """Whether the point belongs to expert parallelism."""
        return self in EXPERT_POINTS

    @property
    def compressible(self) -> bool:
        """Whether traffic of the point may be compressed."""
        return self not in (Point.OPTIMIZER, Point.CONTROL)


EXPERT_POINTS = (Point.EP_DISPATCH_FWD, Point.EP_DISPATCH_BWD, Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD)
"""The four points of expert parallelism."""

EXPERT_LEGS = {
    "ep-dispatch": (Point.EP_DISPATCH_FWD, Point.EP_DISPATCH_BWD),
    "ep-combine": (Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD),
}
"""Command-line names that stand for the forward and the backward point."""

EXPERTS = "experts"
"""Command-line name that stands for all four points, followed by a word from ``EXPERT_CODECS``."""

_EIGHT, _FOUR, _HALF = "fixpoint,bits=8,group=64", "fixpoint,bits=4,group=64,rotation=64", "cast"

EXPERT_CODECS = {
    "default": dict(zip(EXPERT_POINTS, (_EIGHT, _HALF, _HALF, _EIGHT), strict=True)),
    "aggressive": dict(zip(EXPERT_POINTS, (_FOUR, _EIGHT, _EIGHT, _FOUR), strict=True)),
}
"""Specs of the four points by word. Traffic to the experts gets the fewest bits: a token's outputs are summed."""
