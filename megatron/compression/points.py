"""The communication points: every byte that crosses the network does so at one of them."""

from __future__ import annotations

import enum


class Point(enum.Enum):
    """A communication point. The values are the names used on the command line and in logs."""

    PP_FWD = "pp-forward"
    """Activations to the next stage."""
    PP_BWD = "pp-backward"
    """Gradients of activations to the previous stage."""
    DP_GRAD = "dp-grad"
    """Averaging of gradients over data-parallel replicas."""
    EMBED_GRAD = "embedding"
    """Gradients of tied embeddings, over the stages that hold them."""
    TP_FWD = "tp-forward"
    """Tensor- and sequence-parallel collectives of the forward pass."""
    TP_BWD = "tp-backward"
    """Tensor- and sequence-parallel collectives of the backward pass."""
    EP_DISPATCH_FWD = "ep-dispatch-forward"
    """Tokens to the ranks that hold their experts."""
    EP_DISPATCH_BWD = "ep-dispatch-backward"
    """Gradients of these tokens, back to where they came from."""
    EP_COMBINE_FWD = "ep-combine-forward"
    """Experts' outputs, back to where the tokens came from."""
    EP_COMBINE_BWD = "ep-combine-backward"
    """Gradients of experts' outputs, to the ranks that hold the experts."""
    PARAM_GATHER = "param-gather"
    """The all-gather of parameters that the sharded optimizer updated."""
    OUTER = "outer"
    """Differences of islands from their anchor, at the end of a round; gradients while islands go in step."""
    OPTIMIZER = "optimizer"
    """Parts of matrices that the optimizer needs whole, and what it makes of them. Never compressed."""
    CONTROL = "control"
    """Scalars: norms, losses, finite checks. Never compressed."""

    @property
    def is_reduction(self) -> bool:
        """Whether the point's collective is a reduction; else it is a message or an all-gather."""
        return self in (Point.DP_GRAD, Point.EMBED_GRAD, Point.TP_FWD, Point.TP_BWD, Point.OUTER)

    @property
    def forward(self) -> bool:
        """Whether evaluation has this traffic, too."""
        return self in (Point.PP_FWD, Point.TP_FWD, Point.EP_DISPATCH_FWD, Point.EP_COMBINE_FWD)

    @property
    def of_experts(self) -> bool:
        """Whether it carries rows of tokens between the ranks that share experts."""
        return self in EXPERT_POINTS

    @property
    def keeps_state(self) -> bool:
        """Whether a compressor may keep state: not where recomputation would run it again."""
        return self not in (Point.TP_FWD, Point.TP_BWD, Point.PARAM_GATHER, *EXPERT_POINTS)

    @property
    def compressible(self) -> bool:
        """Whether a compressor may serve it."""
        return self not in (Point.OPTIMIZER, Point.CONTROL)


EXPERT_POINTS = (Point.EP_DISPATCH_FWD, Point.EP_DISPATCH_BWD, Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD)
"""The four legs of expert parallelism."""

EXPERT_LEGS = {
    "ep-dispatch": (Point.EP_DISPATCH_FWD, Point.EP_DISPATCH_BWD),
    "ep-combine": (Point.EP_COMBINE_FWD, Point.EP_COMBINE_BWD),
}
"""Names that stand for both directions on the command line."""

EXPERTS = "experts"
"""Name that stands for all four legs, whose codecs a word chooses."""

_EIGHT, _FOUR, _HALF = "fixpoint,bits=8,group=64", "fixpoint,bits=4,group=64,rotation=64", "cast"

EXPERT_CODECS = {
    "default": dict(zip(EXPERT_POINTS, (_EIGHT, _HALF, _HALF, _EIGHT), strict=True)),
    "aggressive": dict(zip(EXPERT_POINTS, (_FOUR, _EIGHT, _EIGHT, _FOUR), strict=True)),
}
"""Specs of the four legs by these words. Fewest bits go to the experts: what comes back is added up over a token's."""
