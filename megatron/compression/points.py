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
    PARAM_GATHER = "param-gather"
    """The all-gather of parameters that the sharded optimizer updated."""
    CONTROL = "control"
    """Scalars: norms, losses, finite checks. Never compressed."""

    @property
    def is_reduction(self) -> bool:
        """Whether the point's collective is a reduction; else it is a message or an all-gather."""
        return self in (Point.DP_GRAD, Point.EMBED_GRAD, Point.TP_FWD, Point.TP_BWD)

    @property
    def forward(self) -> bool:
        """Whether evaluation has this traffic, too."""
        return self in (Point.PP_FWD, Point.TP_FWD)

    @property
    def keeps_state(self) -> bool:
        """Whether a compressor may keep state: not where recomputation would run it again."""
        return self not in (Point.TP_FWD, Point.TP_BWD, Point.PARAM_GATHER)

    @property
    def compressible(self) -> bool:
        """Whether a compressor may serve it."""
        return self is not Point.CONTROL
