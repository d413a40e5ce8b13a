"""Settings of ``fixpoint`` that ``--compress auto`` may choose, with their costs in loss (docs/results/loss.md)."""

from __future__ import annotations

from megatron.compression.ladder import Rung
from megatron.compression.points import Point

LADDER = {
    Point.PP_FWD: (
        Rung("bits=8", {250: (0.011, -0.01, 0.0), 1000: (0.003, 0.077, 0.008)}),
        Rung(
            "bits=4,grid=minmax,scale-dtype=bf16,rotation=64", {250: (0.181, 0.215, 0.264), 1000: (0.307, 0.224, 0.329)}
        ),
    ),
    Point.PP_BWD: (
        Rung("bits=6", {250: (0.035, 0.011, 0.012), 1000: (-0.012, -0.029, -0.001)}),
        Rung("bits=4,rotation=64", {250: (0.035, 0.006, 0.151), 1000: (-0.087, 0.177, 0.012)}),
    ),
    Point.DP_GRAD: (
        Rung(
            "bits=8,error-feedback=on",
            {250: (0.048, 0.027, 0.016), 1000: (0.124, -0.042, 0.044)},
            residual=0.0089,
        ),
        Rung(
            "bits=4,error-feedback=on",
            {250: (0.307, 0.083, 0.137), 1000: (0.268, 0.118, 0.38)},
            residual=0.161,
        ),
        Rung(
            "levels=8/4,error-feedback=on",
            {250: (0.267, 0.145, -0.036), 1000: (0.222, 0.174, 0.138)},
            residual=0.174,
        ),
        Rung(
            "bits=2,rotation=64,error-feedback=on",
            {250: (2.199, 1.897, 3.16), 1000: (1.134, 1.805, 1.405)},
            residual=0.683,
        ),
    ),
    Point.PARAM_GATHER: (Rung("bits=4,group=2048", {250: (-0.01, 0.012, 0.104), 1000: (0.061, 0.013, -0.038)}),),
    Point.TP_FWD: (Rung("bits=8", {250: (0.038, 0.005, 0.011), 1000: (-0.038, -0.018, 0.038)}),),
    Point.TP_BWD: (Rung("bits=8", {250: (-0.005, 0.014, -0.044), 1000: (0.085, 0.063, -0.109)}),),
    Point.EP_DISPATCH_FWD: (Rung("bits=8", {1000: (-0.004, 0.083, -0.282)}),),
    Point.EP_DISPATCH_BWD: (Rung("bits=8", {1000: (0.207, -0.24, -0.136)}),),
    Point.EP_COMBINE_FWD: (Rung("bits=8", {1000: (0.334, -0.106, -0.325)}),),
    Point.EP_COMBINE_BWD: (Rung("bits=8", {1000: (0.316, 0.008, -0.041)}),),
}
