"""Optimizers that need whole matrices: the same numbers on any layout."""

from __future__ import annotations

import pytest

from tests.multiprocess.test_layouts import DIST, DOUBLE, LAYOUTS, OVERLAP, Changes, _agree, _chosen, _divide, _parallel
from tests.support.combinations import mark_repeats

pytestmark = pytest.mark.multiprocess


LAMB: Changes = {
    "optimizer": {"optimizer": "lamb", "lr": 2e-2},
    "model": {"init_method_std": 0.2},  # matrices move by a share of their norm
    **DOUBLE,
}
LAMB_LAYOUTS = {
    2: ("tp2 padded micro 2", "dp2 sharded overlap micro 2", "pp2 virtual"),
    4: ("tp2 dp2 sp sharded overlap", "pp2 dp2 sharded", "tp4 micro 2"),
    8: ("tp2 pp2 dp2 everything",),
}
"""Layouts that cut a matrix (LAMB needs norms of whole matrices), or hold the tied embedding twice."""


@pytest.mark.parametrize("world_size", mark_repeats(LAMB_LAYOUTS, keep=[2]))
def test_lamb_uses_norms_of_whole_matrices(world_size: int) -> None:
    reference = _agree(world_size, LAMB, 4, _chosen(world_size, LAMB_LAYOUTS))
    assert reference.losses[-1] < reference.losses[0] - 0.1


MUON: Changes = {
    "optimizer": {"optimizer": "muon", "lr": 1e-2},
    "model": {"swiglu": True, "num_query_groups": 2, "ffn_hidden_size": 48, "num_experts": [4], "expert_interval": 2},
    **DOUBLE,
}
CUT = {
    2: {
        **{name: LAYOUTS[2][name] for name in ("tp2 sp", "dp2 sharded", "pp2 virtual")},
        "ep2": _parallel(expert_model_parallel_size=2),
    },
    4: {
        **{name: LAYOUTS[4][name] for name in ("tp2 dp2 sp sharded overlap", "pp2 dp2 virtual overlap", "dp4 sharded")},
        "ep2 tp2 sharded": _parallel(tp=2, expert_model_parallel_size=2, **DIST),
        "ep2 of whole experts tp2 sharded": _parallel(
            tp=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1, **DIST
        ),
        "ep2 dp4 sharded": _parallel(expert_model_parallel_size=2, **DIST, **OVERLAP),
    },
    8: {name: LAYOUTS[8][name] for name in ("tp2 pp2 dp2 everything",)},
}
"""Layouts that cut matrices, along rows, columns, and anywhere, and hold experts on other ranks."""
CUT_ALIKE = {
    4: ("pp2 dp2 virtual overlap", "dp4 sharded", "ep2 tp2 sharded", "ep2 dp4 sharded"),
    8: tuple(CUT[8]),
}


@pytest.mark.parametrize(("world_size", "layouts"), _divide(CUT, CUT_ALIKE))
def test_muon_uses_whole_matrices_on_any_layout(world_size: int, layouts: dict[str, Changes]) -> None:
    reference = _agree(world_size, MUON, 4, layouts)
    assert reference.losses[-1] < reference.losses[0] - 0.05
