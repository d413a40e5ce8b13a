"""The communication points: every byte that crosses the network does so at one of them."""

from __future__ import annotations

import enum


class Point(enum.Enum):
    """Where traffic arises. The values are the names used on the command line and in logs."""

    PP_FWD = "pp-forward"
    """Activations to the next stage."""
    PP_BWD = "pp-backward"
    """Gradients of activations to the previous stage."""
    DP_GRAD = "dp-grad"
    """Averaging of gradients over data-parallel replicas."""
    EMBED_GRAD = "embedding"
    """Gradients of the tied embedding, first and last stage."""
    TP_FWD = "tp-forward"
    """Tensor- and sequence-parallel collectives of the forward pass."""
    TP_BWD = "tp-backward"
    """Tensor- and sequence-parallel collectives of the backward pass."""
    PARAM_GATHER = "param-gather"
    """Gathering of parameters that the sharded optimizer updated."""
    CONTROL = "control"
    """Scalars: norms, losses, finite checks. Never compressed."""
